"""What dispatch and combine refuse: every rank raises, the rank at fault is named, and the buffer goes on working."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import BACKENDS, Setup, assert_works, caught, mark, open_buffer, setups

Seen = tuple[type[BaseException] | None, str]


@dataclass(frozen=True)
class Bad:
    """Arguments that replace good ones, and the error that they bring. `says` must all stand in its text."""

    name: str
    changes: dict[str, Any]
    says: tuple[str, ...]
    kind: type[Exception] = ValueError


def each(cases: list[Bad]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bad", cases, ids=lambda bad: bad.name)


def on_ranks(*worlds: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrises a test by backend and by world, the number of ranks."""
    of_worlds = pytest.mark.parametrize("world", [pytest.param(world, marks=mark(world)) for world in worlds])
    of_backends = pytest.mark.parametrize("backend", BACKENDS)
    return lambda test: of_worlds(of_backends(test))


def assert_refused(seen: list[Seen], bad: Bad, bad_rank: int) -> None:
    """Every rank raised the error, with the values, and named the rank that gave them."""
    for rank, (kind, text) in enumerate(seen):
        assert kind is bad.kind, f"rank {rank}: {kind} {text}"
        for part in bad.says:
            assert part in text, f"rank {rank}: {text}"
        assert len(seen) == 1 or f"rank {bad_rank}" in text, f"rank {rank}: {text}"


def assert_disagreement(seen: list[Seen], bad: Bad) -> None:
    """Every rank raised one and the same ConfigError, with both ranks and both values."""
    assert len(set(seen)) == 1
    kind, text = seen[0]
    assert kind is moe_ep.ConfigError, f"{kind} {text}"
    for part in (*bad.says, "rank 0", "rank 1"):
        assert part in text, text


# -- dispatch ---------------------------------------------------------------------------------------------------------


def good_dispatch() -> dict[str, Any]:
    return {
        "x": torch.ones(2, 4),
        "topk_idx": torch.tensor([[0, 3], [1, 2]]),
        "topk_weights": torch.full((2, 2), 0.5),
        "num_experts": 4,
    }


def placed(arguments: dict[str, Any], backend: str) -> dict[str, Any]:
    """The arguments with their tensors where the backend works."""
    device = Setup(backend, "expert_major", 1).device
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def dispatch_badly(group: dist.ProcessGroup, backend: str, changes: dict[str, Any], bad_rank: int) -> Seen:
    with open_buffer(group, backend) as buffer:
        arguments = placed({**good_dispatch(), **(changes if buffer.rank == bad_rank else {})}, backend)
        seen = caught(lambda: moe_ep.dispatch(buffer, **arguments))
        assert_works(buffer, group, Setup(backend, "expert_major", buffer.group_size))
        return seen


BAD_DISPATCH = [
    Bad("x with one dimension", {"x": torch.ones(2)}, ("x has shape [2]", "two dimensions")),
    Bad("x with three dimensions", {"x": torch.ones(2, 2, 4)}, ("x has shape [2, 2, 4]", "two dimensions")),
    Bad("x without hidden elements", {"x": torch.ones(2, 0)}, ("x has shape [2, 0]", "hidden >= 1")),
    Bad("x of int64", {"x": torch.ones(2, 4).long()}, ("torch.int64", "bfloat16"), TypeError),
    Bad("x a list", {"x": [[1.0] * 4] * 2}, ("x is", "list"), TypeError),
    Bad("ids for more tokens", {"topk_idx": torch.zeros(3, 2).long()}, ("[3, 2]", "[2, 4]")),
    Bad("ids with one dimension", {"topk_idx": torch.zeros(2).long()}, ("topk_idx has shape [2]",)),
    Bad("no slots", {"topk_idx": torch.zeros(2, 0).long()}, ("K = 0", "1..64")),
    Bad("too many slots", {"topk_idx": torch.full((2, 65), -1)}, ("K = 65", "1..64")),
    Bad("ids of float64", {"topk_idx": torch.zeros(2, 2).double()}, ("torch.float64", "int64, int32"), TypeError),
    Bad("ids of uint8", {"topk_idx": torch.zeros(2, 2).byte()}, ("torch.uint8", "int64, int32"), TypeError),
    Bad("ids a list", {"topk_idx": [[0, 1], [2, 3]]}, ("topk_idx is", "list"), TypeError),
    Bad("ids too large", {"topk_idx": torch.tensor([[0, 1], [2, 4]])}, ("topk_idx[1, 1] is 4", "[-1, 4)")),
    Bad("ids too small", {"topk_idx": torch.tensor([[0, -2], [2, 3]])}, ("topk_idx[0, 1] is -2", "[-1, 4)")),
    Bad("weights for fewer slots", {"topk_weights": torch.ones(2, 1)}, ("[2, 1]", "[2, 2]")),
    Bad("weights for other tokens", {"topk_weights": torch.ones(3, 2)}, ("[3, 2]", "[2, 2]")),
    Bad("weights of int64", {"topk_weights": torch.ones(2, 2).long()}, ("topk_weights is torch.int64",), TypeError),
    Bad(
        "weights of float64 beside float32",
        {"topk_weights": torch.ones(2, 2).double()},
        ("topk_weights is float64", "torch.float32"),
        TypeError,
    ),
    Bad("weights a list", {"topk_weights": [[1.0, 1.0]] * 2}, ("topk_weights is", "list"), TypeError),
    Bad("no experts", {"num_experts": 0, "topk_idx": torch.full((2, 2), -1)}, ("num_experts is 0", "at least 1")),
    Bad("a fraction of an expert", {"num_experts": 4.5}, ("num_experts is 4.5",), TypeError),
    Bad("an unknown layout", {"layout": "expert-major"}, ("'expert-major'", "compact", "expert_major")),
    Bad("num_experts 2^21", {"num_experts": 2**21}, ("num_experts is 2097152", "at most 1048576")),
    Bad("alignment 0", {"alignment": 0}, ("alignment is 0", "at least 1")),
    Bad("alignment -8", {"alignment": -8}, ("alignment is -8", "at least 1")),
    Bad("alignment 2^30", {"alignment": 2**30}, ("alignment is 1073741824", "may be at most 2147483647")),
    Bad("alignment 1.5", {"alignment": 1.5}, ("alignment is 1.5",), TypeError),
    Bad("max_rows -1", {"max_rows": -1}, ("max_rows is -1", "at least 0")),
    Bad("max_rows 6.5", {"max_rows": 6.5}, ("max_rows is 6.5",), TypeError),
]


@each(BAD_DISPATCH)
@on_ranks(1, 3)
def test_dispatch_refuses_bad_arguments_on_every_rank(ranks: Pools, backend: str, world: int, bad: Bad) -> None:
    bad_rank = min(1, world - 1)
    assert_refused(ranks.run(dispatch_badly, world, backend, bad.changes, bad_rank), bad, bad_rank)


def dispatch_with_placement(group: dist.ProcessGroup, backend: str, num_experts: list[int]) -> Seen:
    """A buffer that places 4 experts; the ranks ask for `num_experts[rank]`."""
    placement = [place % dist.get_world_size(group) for place in (1, 0, 1, 0)]
    with open_buffer(group, backend, expert_placement=placement) as buffer:
        arguments = {**good_dispatch(), "num_experts": num_experts[buffer.rank]}
        seen = caught(lambda: moe_ep.dispatch(buffer, **arguments))
        out = moe_ep.dispatch(buffer, **good_dispatch())
        assert torch.equal(moe_ep.combine(buffer, out.x, out.handle, out.topk_weights), torch.ones(2, 4))
        return seen


@on_ranks(1, 2, 4)
def test_dispatch_refuses_a_number_of_experts_that_is_not_placed(ranks: Pools, backend: str, world: int) -> None:
    bad = Bad("", {}, ("num_experts is 8", "4 experts"))
    num_experts = [8 if rank == world - 1 else 4 for rank in range(world)]
    assert_refused(ranks.run(dispatch_with_placement, world, backend, num_experts), bad, world - 1)


def place_badly(group: dist.ProcessGroup, backend: str, placement: list[int]) -> Seen:
    return caught(lambda: open_buffer(group, backend, expert_placement=placement).close())


@on_ranks(1, 2, 4)
def test_a_placement_on_a_rank_that_does_not_exist_is_refused(ranks: Pools, backend: str, world: int) -> None:
    for placement, says in (
        ([0, world], (f"expert 1 to rank {world}", f"0..{world - 1}")),
        ([-1], ("rank -1",)),
        ([], ("empty",)),
    ):
        for kind, text in ranks.run(place_badly, world, backend, placement):
            assert kind is not None
            assert issubclass(kind, ValueError)
            assert all(part in text for part in says), text


DISAGREE_IN_DISPATCH = [
    Bad("hidden", {"x": torch.ones(2, 6)}, ("hidden size", "has 4", "has 6")),
    Bad("dtype", {"x": torch.ones(2, 4).bfloat16()}, ("dtype of the rows", "torch.float32", "torch.bfloat16")),
    Bad(
        "topk",
        {"topk_idx": torch.tensor([[0, 1, 2]] * 2), "topk_weights": torch.ones(2, 3)},
        ("slots a token K", "has 2", "has 3"),
    ),
    Bad("num_experts", {"num_experts": 8}, ("num_experts", "has 4", "has 8")),
    Bad("layout", {"layout": "compact"}, ("the layout", "has expert_major", "has compact")),
    Bad("alignment", {"alignment": 8}, ("the alignment", "has 1", "has 8")),
    Bad("weights on one rank", {"topk_weights": None}, ("topk_weights", "has torch.float32", "has none")),
]


@each(DISAGREE_IN_DISPATCH)
@on_ranks(3)
def test_dispatch_settings_that_differ_raise_on_every_rank(ranks: Pools, backend: str, world: int, bad: Bad) -> None:
    assert_disagreement(ranks.run(dispatch_badly, world, backend, bad.changes, 1), bad)


def place_differently(group: dist.ProcessGroup, backend: str) -> Seen:
    rank = dist.get_rank(group)
    with open_buffer(group, backend, expert_placement=[0, 0, 1, 1] if rank == 0 else [0, 1, 0, 1]) as buffer:
        seen = caught(lambda: moe_ep.dispatch(buffer, **good_dispatch()))
        assert buffer.all_reduce(torch.ones(1)).item() == buffer.group_size
        return seen


@on_ranks(2, 4)
def test_placements_that_differ_raise_on_every_rank(ranks: Pools, backend: str, world: int) -> None:
    assert_disagreement(ranks.run(place_differently, world, backend), Bad("", {}, ("expert_placement",)))


def weights_of_two_widths(group: dist.ProcessGroup, backend: str) -> Seen:
    with open_buffer(group, backend) as buffer:
        arguments = {**good_dispatch(), "x": torch.ones(2, 4).double()}
        if buffer.rank == 1:
            arguments["topk_weights"] = torch.full((2, 2), 0.5).double()
        seen = caught(lambda: moe_ep.dispatch(buffer, **arguments))
        assert_works(buffer, group, Setup(backend, "expert_major", buffer.group_size))
        return seen


@on_ranks(2)
def test_weights_of_two_dtypes_raise_on_every_rank(ranks: Pools, backend: str, world: int) -> None:
    bad = Bad("", {}, ("dtype of topk_weights", "torch.float32", "torch.float64"))
    assert_disagreement(ranks.run(weights_of_two_widths, world, backend), bad)


# -- combine ----------------------------------------------------------------------------------------------------------

Spoil = Callable[[dict[str, Any]], dict[str, Any]]

SPOILERS: dict[str, Spoil] = {
    "one row less": lambda given: {"rows": given["rows"][:-1]},
    "one row more": lambda given: {"rows": torch.cat([given["rows"], given["rows"][:1]])},
    "three dimensions": lambda given: {"rows": given["rows"].unsqueeze(0)},
    "int64 rows": lambda given: {"rows": given["rows"].long()},
    "rows a list": lambda given: {"rows": given["rows"].tolist()},
    "no handle": lambda given: {"handle": None},
    "one weight less": lambda given: {"topk_weights": torch.ones(given["rows"].shape[0] - 1)},
    "weights of two dimensions": lambda given: {"topk_weights": torch.ones(given["rows"].shape[0], 1)},
    "int64 weights": lambda given: {"topk_weights": torch.ones(given["rows"].shape[0]).long()},
    "float64 weights": lambda given: {"topk_weights": torch.ones(given["rows"].shape[0]).double()},
    "weights a list": lambda given: {"topk_weights": [1.0] * given["rows"].shape[0]},
    "weights on one rank": lambda given: {"topk_weights": None},
    "compact weights": lambda given: {"topk_weights": torch.ones(given["rows"].shape[0])},
    "exact": lambda given: {"exact": True},
    "another hidden": lambda given: {"rows": torch.ones(given["rows"].shape[0], 6)},
    "another dtype": lambda given: {"rows": given["rows"].half()},
    "an older handle": lambda given: {"handle": given["older"]},
    "a handle of one rank": lambda given: {"handle": given["alone"]},
}


def combine_badly(group: dist.ProcessGroup, backend: str, layout: str, name: str, bad_rank: int) -> Seen:
    """Rank r holds r + 1 tokens, each for every expert, so each of the W ranks has W * (W + 1) / 2 rows of its own."""
    with open_buffer(group, backend) as buffer, moe_ep.Buffer(None, backend=backend) as one_rank:
        world, count = buffer.group_size, buffer.rank + 1
        idx = torch.arange(world).repeat(count, 1)
        older, out = (
            moe_ep.dispatch(
                buffer, torch.ones(count, 4), ids, torch.ones(count, world), num_experts=world, layout=layout
            )
            for ids in (idx.flip(1), idx)
        )
        num_rows = out.x.shape[0]
        alone = moe_ep.dispatch(one_rank, torch.ones(num_rows, 4), torch.zeros(num_rows, 1).long(), num_experts=1)
        arguments: dict[str, Any] = {"rows": out.x, "handle": out.handle}
        if layout == "expert_major":
            arguments["topk_weights"] = out.topk_weights
        if buffer.rank == bad_rank:
            arguments.update(SPOILERS[name]({**arguments, "older": older.handle, "alone": alone.handle}))
        seen = caught(lambda: moe_ep.combine(buffer, **arguments))
        y = moe_ep.combine(buffer, out.x, out.handle)
        assert torch.equal(y, torch.full((count, 4), float(world)))
        assert_works(buffer, group, Setup(backend, layout, world))
        return seen


BAD_COMBINE = [
    Bad("one row less", {}, ("[{less}, 4]", "{rows} rows")),
    Bad("one row more", {}, ("[{more}, 4]", "{rows} rows")),
    Bad("three dimensions", {}, ("[1, {rows}, 4]", "two dimensions")),
    Bad("int64 rows", {}, ("rows is torch.int64", "bfloat16"), TypeError),
    Bad("rows a list", {}, ("rows is", "list"), TypeError),
    Bad("no handle", {}, ("NoneType", "handle"), TypeError),
    Bad("one weight less", {}, ("[{less}]", "{rows} rows")),
    Bad("weights of two dimensions", {}, ("[{rows}, 1]", "{rows} rows")),
    Bad("int64 weights", {}, ("topk_weights is torch.int64",), TypeError),
    Bad("float64 weights", {}, ("topk_weights is float64", "torch.float32"), TypeError),
    Bad("weights a list", {}, ("topk_weights is", "list"), TypeError),
]


def filled_in(bad: Bad, world: int) -> Bad:
    rows = world * (world + 1) // 2
    says = tuple(part.format(less=rows - 1, rows=rows, more=rows + 1) for part in bad.says)
    return Bad(bad.name, bad.changes, says, bad.kind)


@each(BAD_COMBINE)
@on_ranks(1, 3)
def test_combine_refuses_bad_arguments_on_every_rank(ranks: Pools, backend: str, world: int, bad: Bad) -> None:
    bad_rank = min(1, world - 1)
    seen = ranks.run(combine_badly, world, backend, "expert_major", bad.name, bad_rank)
    assert_refused(seen, filled_in(bad, world), bad_rank)


@each([bad for bad in BAD_COMBINE if "weight" not in bad.name])
@on_ranks(2)
def test_combine_of_compact_rows_refuses_the_same(ranks: Pools, backend: str, world: int, bad: Bad) -> None:
    seen = ranks.run(combine_badly, world, backend, "compact", bad.name, 1)
    assert_refused(seen, filled_in(bad, world), 1)


@pytest.mark.parametrize("name", ["compact weights", "exact"])
@on_ranks(1, 2, 4)
def test_compact_rows_cannot_be_weighted_or_summed_by_slot(ranks: Pools, backend: str, world: int, name: str) -> None:
    bad = Bad(name, {}, ("topk_weights" if name == "compact weights" else "exact=True", "'compact'", "expert_major"))
    seen = ranks.run(combine_badly, world, backend, "compact", name, world - 1)
    assert_refused(seen, bad, world - 1)


@on_ranks(2, 4)
def test_a_handle_of_other_ranks_is_refused(ranks: Pools, backend: str, world: int) -> None:
    bad = Bad("", {}, ("ranks [0]", str(list(range(world)))))
    assert_refused(ranks.run(combine_badly, world, backend, "expert_major", "a handle of one rank", 1), bad, 1)


DISAGREE_IN_COMBINE = [
    Bad("weights on one rank", {}, ("topk_weights", "has torch.float32", "has none")),
    Bad("exact", {}, ("exact", "has 0", "has 1")),
    Bad("another hidden", {}, ("hidden size", "has 4", "has 6")),
    Bad("another dtype", {}, ("dtype of the rows", "torch.float32", "torch.float16")),
    Bad("an older handle", {}, ("the dispatch that is combined",)),
]


@each(DISAGREE_IN_COMBINE)
@on_ranks(3)
def test_combine_settings_that_differ_raise_on_every_rank(ranks: Pools, backend: str, world: int, bad: Bad) -> None:
    assert_disagreement(ranks.run(combine_badly, world, backend, "expert_major", bad.name, 1), bad)


def combine_two_routings(group: dist.ProcessGroup, backend: str, layout: str, routings: list[list[int]]) -> Seen:
    """Rank 0 combines the first dispatch, the others the second; each token names the experts of its routing."""
    with open_buffer(group, backend) as buffer:
        first, second = (
            moe_ep.dispatch(buffer, torch.ones(1, 4), torch.tensor([ids]), num_experts=4, layout=layout)
            for ids in routings
        )
        mine = first if buffer.rank == 0 else second
        seen = caught(lambda: moe_ep.combine(buffer, mine.x, mine.handle))
        assert_works(buffer, group, Setup(backend, layout, buffer.group_size))
        return seen


@pytest.mark.parametrize("second", [[1, 0], [0, 2], [2, 0], [0, -1]])
@setups(2)
def test_handles_of_two_routings_are_told_apart(ranks: Pools, setup: Setup, second: list[int]) -> None:
    seen = ranks.run(combine_two_routings, setup.world, setup.backend, setup.layout, [[0, 1], second])
    assert_disagreement(seen, Bad("", {}, ("the dispatch that is combined",)))


# -- the order of operations ------------------------------------------------------------------------------------------


def out_of_order(group: dist.ProcessGroup, backend: str, layout: str, here: str, there: str) -> Seen:
    """Rank 0 does `here` while the others do `there`; afterwards all do the same again."""
    with open_buffer(group, backend) as buffer:
        x = torch.ones(2, 4, requires_grad=True)
        arguments = {**good_dispatch(), "x": x, "layout": layout}
        out = moe_ep.dispatch(buffer, **arguments)
        y = moe_ep.combine(buffer, out.x, out.handle)
        operations: dict[str, Callable[[], object]] = {
            "dispatch": lambda: moe_ep.dispatch(buffer, **arguments),
            "combine": lambda: moe_ep.combine(buffer, out.x, out.handle),
            "combine backward": lambda: y.sum().backward(retain_graph=True),
            "dispatch backward": lambda: out.x.sum().backward(retain_graph=True),
            "all_reduce": lambda: buffer.all_reduce(torch.ones(4)),
        }
        seen = caught(operations[here if buffer.rank == 0 else there])
        for operation in operations.values():
            operation()
        assert_works(buffer, group, Setup(backend, layout, buffer.group_size))
        return seen


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("dispatch", "combine"),
        ("combine", "dispatch"),
        ("combine backward", "dispatch"),
        ("dispatch backward", "combine backward"),
        ("all_reduce", "combine"),
    ],
)
@setups(3)
def test_operations_out_of_order_raise_on_every_rank(ranks: Pools, setup: Setup, here: str, there: str) -> None:
    seen = ranks.run(out_of_order, setup.world, setup.backend, setup.layout, here, there)
    bad = Bad("", {}, ("the operation", f"rank 0 has {here}", f"rank 1 has {there}"))
    for kind, text in seen:
        assert kind is moe_ep.ConfigError
        assert all(part in text for part in bad.says), text


def reduce_unlike(group: dist.ProcessGroup, backend: str, tensors: list[Tensor]) -> Seen:
    with open_buffer(group, backend) as buffer:
        seen = caught(lambda: buffer.all_reduce(tensors[min(buffer.rank, 1)]))
        assert buffer.all_reduce(torch.ones(2)).tolist() == [buffer.group_size] * 2
        return seen


@on_ranks(2, 4)
def test_all_reduce_of_unlike_tensors_raises_on_every_rank(ranks: Pools, backend: str, world: int) -> None:
    sizes = [torch.ones(3), torch.ones(5)]
    assert_disagreement(ranks.run(reduce_unlike, world, backend, sizes), Bad("", {}, ("has 3", "has 5")))
    dtypes = [torch.ones(3), torch.ones(3).double()]
    both = Bad("", {}, ("torch.float32", "torch.float64"))
    assert_disagreement(ranks.run(reduce_unlike, world, backend, dtypes), both)


def use_closed(group: dist.ProcessGroup, backend: str) -> list[Seen]:
    buffer = open_buffer(group, backend)
    out = moe_ep.dispatch(buffer, **good_dispatch())
    buffer.close()
    buffer.close()
    return [
        caught(lambda: moe_ep.dispatch(buffer, **good_dispatch())),
        caught(lambda: moe_ep.combine(buffer, out.x, out.handle)),
    ]


@on_ranks(1, 2)
def test_a_closed_buffer_says_so(ranks: Pools, backend: str, world: int) -> None:
    for seen in ranks.run(use_closed, world, backend):
        for kind, text in seen:
            assert kind is RuntimeError
            assert "closed" in text
