"""What the kernels inside a node refuse: every rank hears why, the rank at fault is named, and the buffer goes on.

A first dispatch waits for the verdict of all ranks and raises at once. A call without a host wait (combine, backward,
`max_rows`) fills its outputs with NaN, and `check()` or the next call says why.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from tests.distributed.test_bad_input import (
    BAD_COMBINE,
    BAD_DISPATCH,
    DISAGREE_IN_COMBINE,
    DISAGREE_IN_DISPATCH,
    SPOILERS,
    Bad,
    Seen,
    assert_disagreement,
    assert_refused,
    dispatch_badly,
    filled_in,
    good_dispatch,
    placed,
)
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import Setup, assert_works, caught, open_buffer

pytestmark = pytest.mark.gpu
BACKEND = "intranode"


def _dispatch_each(group: dist.ProcessGroup, changes: list[dict[str, Any]], bad_rank: int) -> list[Seen]:
    return [dispatch_badly(group, BACKEND, change, bad_rank) for change in changes]


@pytest.mark.parametrize("world", [1, 3])
def test_dispatch_refuses_bad_arguments_on_every_rank(ranks: Pools, world: int) -> None:  # case I04
    bad_rank = min(1, world - 1)
    by_rank = ranks.run(_dispatch_each, world, [bad.changes for bad in BAD_DISPATCH], bad_rank, timeout_secs=100)
    for bad, *seen in zip(BAD_DISPATCH, *by_rank, strict=True):
        assert_refused(seen, bad, bad_rank)


def test_dispatch_settings_that_differ_raise_on_every_rank_with_both_values(ranks: Pools) -> None:
    by_rank = ranks.run(_dispatch_each, 3, [bad.changes for bad in DISAGREE_IN_DISPATCH], 1, timeout_secs=100)
    for bad, *seen in zip(DISAGREE_IN_DISPATCH, *by_rank, strict=True):
        assert_disagreement(seen, bad)


def _bad_id(group: dist.ProcessGroup, value: int, idx_dtype: torch.dtype) -> Seen:
    """The last rank has one bad id among 2048 tokens: in the last token, in slot 3."""
    with open_buffer(group, BACKEND) as buffer:
        idx = torch.zeros(2048, 4, dtype=idx_dtype, device="cuda")
        if buffer.rank == buffer.group_size - 1:
            idx[2047, 3] = value
        x = torch.ones(2048, 8, device="cuda")
        seen = caught(lambda: moe_ep.dispatch(buffer, x, idx, num_experts=8))
        buffer.check()  # what was raised is not said again
        assert_works(buffer, group, Setup(BACKEND, "compact", buffer.group_size))
        return seen


# case I04
@pytest.mark.parametrize(("value", "idx_dtype"), [(8, torch.int64), (-2, torch.int32), (2**32 + 3, torch.int64)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_bad_id_is_named_with_its_token_and_slot(
    ranks: Pools, world: int, value: int, idx_dtype: torch.dtype
) -> None:
    bad = Bad("", {}, (f"topk_idx[2047, 3] is {value}", "[-1, 8)"))
    assert_refused(ranks.run(_bad_id, world, value, idx_dtype), bad, world - 1)


Late = tuple[Seen, bool, Seen]  # what the call raised, whether its output is all NaN, what check() raised then


def _combine_badly(group: dist.ProcessGroup, layout: str, names: list[str]) -> list[Late]:
    """Rank r holds r + 1 tokens, each for every expert, so each of the W ranks has W * (W + 1) / 2 rows of its own."""
    results = []
    with open_buffer(group, BACKEND) as buffer, moe_ep.Buffer(None, backend=BACKEND) as one_rank:
        world, count = buffer.group_size, buffer.rank + 1
        for name in names:
            idx = torch.arange(world, device="cuda").repeat(count, 1)
            x, weights = torch.ones(count, 4, device="cuda"), torch.ones(count, world, device="cuda")
            older, out = (
                moe_ep.dispatch(buffer, x, ids, weights, num_experts=world, layout=layout) for ids in (idx.flip(1), idx)
            )
            rows = out.x
            zeros = torch.zeros(len(rows), 1, dtype=torch.int64, device="cuda")
            alone = moe_ep.dispatch(one_rank, torch.ones_like(rows), zeros, num_experts=1)
            arguments: dict[str, Any] = {"rows": rows, "handle": out.handle}
            if layout == "expert_major":
                arguments["topk_weights"] = out.topk_weights
            if buffer.rank == min(1, world - 1):
                given = {**arguments, "older": older.handle, "alone": alone.handle}
                arguments.update(placed(SPOILERS[name](given), BACKEND))
            y: list[Tensor] = []
            seen = caught(lambda y=y, arguments=arguments: y.append(moe_ep.combine(buffer, **arguments)))
            torch.cuda.synchronize()
            results.append((seen, bool(y) and bool(y[0].isnan().all()), caught(buffer.check)))
            good = moe_ep.combine(buffer, out.x, out.handle)
            assert torch.equal(good, torch.full_like(good, float(world))), name
            assert_works(buffer, group, Setup(BACKEND, layout, world))
    return results


@pytest.mark.parametrize("layout", ["expert_major", "compact"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_combine_that_one_rank_refuses_gives_the_others_nan_and_a_sentence(
    ranks: Pools, layout: str, world: int
) -> None:  # case T09
    cases = [bad for bad in BAD_COMBINE if layout == "expert_major" or "weight" not in bad.name]
    bad_rank = min(1, world - 1)
    by_rank = ranks.run(_combine_badly, world, layout, [bad.name for bad in cases], timeout_secs=100)
    for template, *by_case in zip(cases, *by_rank, strict=True):
        bad = filled_in(template, world)
        at_once, _, later = by_case[bad_rank]
        assert_refused([at_once], bad, bad_rank)
        assert later == (None, "")
        for rank, (raised, is_nan, said) in enumerate(by_case):
            if rank != bad_rank:
                assert raised == (None, "")
                assert is_nan, bad.name
                assert said[0] is RuntimeError
                assert f"EP rank {bad_rank} refused combine: " in said[1]
                assert all(part in said[1] for part in bad.says), said[1]


def _weights_beside(group: dist.ProcessGroup) -> tuple[bool, str]:
    """Rank 1 gives too few rows to a combine that sums weights too; then all make it right."""
    with open_buffer(group, BACKEND) as buffer:
        x, weights = torch.ones(5, 8, device="cuda"), torch.rand(5, 2, device="cuda")
        idx = torch.arange(10, device="cuda").view(5, 2) % buffer.group_size
        out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=buffer.group_size, layout="compact")
        right, right_weights, _ = buffer.combine(out.x, out.handle, out.topk_weights)
        is_nan, text = True, ""
        for _ in range(2):
            if buffer.rank == 1:
                text = caught(lambda: buffer.combine(out.x[:-1], out.handle, out.topk_weights))[1]
            else:
                y, summed, _ = buffer.combine(out.x, out.handle, out.topk_weights)
                torch.cuda.synchronize()
                assert summed is not None
                is_nan = bool(y.isnan().all()) and bool(summed.isnan().all())
                text = caught(buffer.check)[1]
            again, again_weights, _ = buffer.combine(out.x, out.handle, out.topk_weights)
            assert torch.equal(again, right)
            assert again_weights is not None
            assert right_weights is not None
            assert torch.equal(again_weights, right_weights)
        buffer.check()
        assert_works(buffer, group, Setup(BACKEND, "compact", buffer.group_size))
        return is_nan, text


@pytest.mark.parametrize("world", [2, 4])
def test_a_combine_that_sums_weights_too_is_refused_with_both_of_its_parts(ranks: Pools, world: int) -> None:
    for is_nan, text in ranks.run(_weights_beside, world):
        assert is_nan
        assert text.startswith("EP rank 1 refused combine: ")


def test_combine_settings_that_differ_give_nan_and_a_sentence_on_every_rank(ranks: Pools) -> None:
    by_rank = ranks.run(_combine_badly, 3, "expert_major", [bad.name for bad in DISAGREE_IN_COMBINE], timeout_secs=100)
    for bad, *by_case in zip(DISAGREE_IN_COMBINE, *by_rank, strict=True):
        for raised, is_nan, said in by_case:
            assert raised == (None, ""), bad.name
            assert is_nan, bad.name
            assert said[0] is RuntimeError
            assert all(part in said[1] for part in (*bad.says, "rank 0", "rank 1")), said[1]


def _out_of_order(group: dist.ProcessGroup, there: str) -> tuple[Seen, Seen]:
    """Rank 0 makes a first dispatch while the others do something else."""
    with open_buffer(group, BACKEND) as buffer:
        x = torch.ones(2, 4, device="cuda", requires_grad=True)
        arguments = placed({**good_dispatch(), "x": x}, BACKEND)
        out = moe_ep.dispatch(buffer, **arguments)
        y = moe_ep.combine(buffer, out.x.detach().requires_grad_(), out.handle)  # its backward is one exchange
        operations = {
            "dispatch": lambda: moe_ep.dispatch(buffer, **arguments),
            "combine": lambda: moe_ep.combine(buffer, out.x, out.handle),
            "combine backward": lambda: y.sum().backward(retain_graph=True),
            "all_reduce": lambda: buffer.all_reduce(torch.ones(4, device="cuda")),
        }
        seen = caught(operations["dispatch" if buffer.rank == 0 else there])
        torch.cuda.synchronize()
        later = caught(buffer.check)
        for operation in operations.values():
            operation()
        assert_works(buffer, group, Setup(BACKEND, "expert_major", buffer.group_size))
        return seen, later


@pytest.mark.parametrize("there", ["combine", "combine backward", "all_reduce"])
def test_operations_out_of_order_are_told_to_every_rank(ranks: Pools, there: str) -> None:
    (first, later), *others = ranks.run(_out_of_order, 3, there)
    parts = ("the operation", "rank 0 has dispatch", f"rank 1 has {there}")
    assert first[0] is moe_ep.ConfigError
    assert later == (None, "")
    for text in (first[1], *(said[1] for _, said in others)):
        assert all(part in text for part in parts), text
    assert all(raised == (None, "") and said[0] is RuntimeError for raised, said in others)


def _refused_twice(group: dist.ProcessGroup) -> tuple[list[str], str]:
    """Rank 1 refuses two combines in a row; the others have started both, and look only then."""
    with open_buffer(group, BACKEND) as buffer:
        out = moe_ep.dispatch(buffer, **placed(good_dispatch(), BACKEND))
        bad = (out.x[1:], out.x.long())
        said: list[str] = []
        if buffer.rank != 1:
            y = [moe_ep.combine(buffer, out.x, out.handle) for _ in bad]
        dist.barrier(group)
        if buffer.rank == 1:
            said = [caught(lambda rows=rows: moe_ep.combine(buffer, rows, out.handle))[1] for rows in bad]
        torch.cuda.synchronize()
        dist.barrier(group)
        if buffer.rank != 1:
            assert all(bool(sums.isnan().all()) for sums in y)
        later = caught(buffer.check)[1]
        assert_works(buffer, group, Setup(BACKEND, "expert_major", buffer.group_size))
        return said, later


@pytest.mark.parametrize("world", [2, 3])
def test_of_two_refusals_before_a_look_the_first_is_told_and_the_other_counted(ranks: Pools, world: int) -> None:
    results = ranks.run(_refused_twice, world)
    said = results[1][0]
    assert results[1][1] == ""
    for rank in range(world):
        if rank != 1:
            assert results[rank][1].startswith(said[0])
            assert results[rank][1].endswith(
                "One more call was refused before this rank looked: see the logs of all ranks."
            )


def _on_the_cpu(group: dist.ProcessGroup) -> Seen:
    with open_buffer(group, BACKEND) as buffer:
        arguments = good_dispatch() if buffer.rank == 1 else placed(good_dispatch(), BACKEND)
        seen = caught(lambda: moe_ep.dispatch(buffer, **arguments))
        assert_works(buffer, group, Setup(BACKEND, "expert_major", buffer.group_size))
        return seen


def test_rows_on_the_cpu_are_refused_on_every_rank(ranks: Pools) -> None:
    assert_refused(ranks.run(_on_the_cpu, 2), Bad("", {}, ("rows are on cpu", "run on cuda:")), 1)
