"""Backend `internode` on kernels that are played on the CPU: the contract, rounds, crossings, and all other calls."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep.errors import ConfigError
from tests.distributed.conformance import check_every_routing
from tests.helpers.compare import assert_same_bits
from tests.helpers.internode_jobs import as_torch_does, low_level
from tests.helpers.played_kernels import PlayedKernels, played
from tests.helpers.ranks import Pools
from tests.helpers.routing import ROUTINGS, TOKEN_COUNTS
from tests.helpers.small_slots import slots_of

SHAPES = [(2, 1), (2, 2)]  # (nodes, ranks a node)
SLOW_SHAPES = [pytest.param(*shape, marks=pytest.mark.slow(ci=True)) for shape in [(1, 2), (3, 1), (4, 1)]]
TIGHT = 2048  # bytes of a rail: many rounds
ROOMY = pytest.param(1 << 20, marks=pytest.mark.slow(ci=True))  # one holds everything


def _every_routing(
    group: dist.ProcessGroup, ranks_per_node: int, layout: str, dtype: torch.dtype, exact: bool, staging_bytes: int
) -> int:
    with played(group, ranks_per_node, staging_bytes) as kernels:
        num_checks = check_every_routing(group, layout, dtype, ranks_per_node, "ipc", exact)
    crosses = dist.get_world_size(group) > ranks_per_node
    assert (kernels.crossed[0] > 0, kernels.num_in_place > 0) == (crosses, crosses)
    return num_checks


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), SHAPES + SLOW_SHAPES)
@pytest.mark.parametrize("staging_bytes", [TIGHT, ROOMY])
@pytest.mark.parametrize(("layout", "dtype"), [("compact", torch.bfloat16), ("expert_major", torch.float32)])
def test_rows_sums_and_gradients_are_those_of_the_loops(
    ranks: Pools, layout: str, dtype: torch.dtype, staging_bytes: int, num_nodes: int, ranks_per_node: int
) -> None:
    world, args = num_nodes * ranks_per_node, (ranks_per_node, layout, dtype, False, staging_bytes)
    assert ranks.run(_every_routing, world, *args, timeout_secs=200) == [len(ROUTINGS) * len(TOKEN_COUNTS)] * world


def _sums_in_rounds(group: dist.ProcessGroup, layout: str) -> int:
    with played(group, 4, 1 << 20), slots_of(3) as numbers:
        check_every_routing(group, layout, torch.bfloat16, 4, "ipc", False)
    return max(numbers)


@pytest.mark.parametrize("layout", ["compact", "expert_major"])
def test_sums_inside_a_node_of_four_ranks_may_take_rounds(ranks: Pools, layout: str) -> None:
    assert ranks.run(_sums_in_rounds, 4, layout, timeout_secs=200) == [7] * 4, "seven tokens, one a round"


def _played(group: dist.ProcessGroup, job: str, ranks_per_node: int, *args: Any) -> Any:
    with played(group, ranks_per_node, TIGHT * 8):
        if job == "low_level":
            return low_level(group, "ipc", "cpu", ranks_per_node)
        return as_torch_does(group, "ipc", "cpu", ranks_per_node, *args)


@pytest.mark.parametrize(("layout", "num_nodes", "ranks_per_node"), [("compact", 2, 2), ("expert_major", 3, 1)])
def test_rows_cross_once_for_each_node_and_sums_are_those_of_collectives(
    ranks: Pools, layout: str, num_nodes: int, ranks_per_node: int
) -> None:
    args = ("as_torch_does", ranks_per_node, layout, 60, 32)
    assert all(num > 0 for num in ranks.run(_played, num_nodes * ranks_per_node, *args))


@pytest.mark.parametrize(("world", "ranks_per_node"), [(2, 1), (4, 2)])
def test_every_other_call_gives_what_collectives_give(ranks: Pools, world: int, ranks_per_node: int) -> None:
    expected = ranks.run(low_level, world, "torch", "cpu", ranks_per_node)
    actual = ranks.run(_played, world, "low_level", ranks_per_node)
    for theirs, ours in zip(expected, actual, strict=True):
        for number, (one, two) in enumerate(zip(theirs, ours, strict=True)):
            assert_same_bits(two, one, f"result {number}")


def _life(group: dist.ProcessGroup, ranks_per_node: int) -> list[str]:
    """Two buffers side by side, a reset, refusals that leave the buffer usable, two closes."""
    world, said = dist.get_world_size(group), []
    idx = torch.arange(24).view(12, 2) % world
    settings: dict[str, Any] = {"backend": "internode", "hop": "ipc", "ranks_per_node": ranks_per_node}

    def works(buffer: moe_ep.Buffer, hidden: int) -> None:
        x = torch.randn(12, hidden, generator=torch.Generator().manual_seed(dist.get_rank(group)))
        out = moe_ep.dispatch(buffer, x, idx, None, num_experts=world, layout="compact")
        rows = {rank for token in idx.tolist() for rank in token}
        assert torch.equal(moe_ep.combine(buffer, out.x, out.handle), x * 2)
        assert len(rows) == world

    with played(group, ranks_per_node, TIGHT * 4):
        one, two = (moe_ep.Buffer(group, timeout_secs=20, **settings) for _ in range(2))
        for buffer, hidden in ((one, 8), (two, 16), (one, 8)):
            works(buffer, hidden)
        one.reset()
        works(one, 8)
        bad = idx.masked_fill(idx == 0, 99) if dist.get_rank(group) == 1 else idx
        for x, ids in ((torch.zeros(12, 4000), idx), (torch.zeros(12, 8), bad)):
            try:
                moe_ep.dispatch(one, x, ids, None, num_experts=world, layout="compact")
            except ValueError as error:
                said.append(str(error))
        works(one, 8)
        two.close()
        two.close()
        works(one, 8)
        one.close()
    return said


def test_buffers_live_side_by_side_and_a_refusal_or_a_reset_leaves_them_usable(ranks: Pools) -> None:
    for said in ranks.run(_life, 4, 2):
        assert len(said) == 2
        assert "a row has 16000 bytes, but a rail between 2 nodes has room for 1024 from each" in said[0]
        assert "EP rank 1 refused dispatch: topk_idx[0, 0] is 99" in said[1]


def _refused(group: dist.ProcessGroup, hop: str, backend: str) -> str:
    try:
        moe_ep.Buffer(group, backend=backend, hop=hop, timeout_secs=20)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("hop", "backend", "sentence"),
    [
        ("radio", "internode", "hop is 'radio'; it must be one of auto, torch, ipc, nvshmem"),
        ("ipc", "torch", "hop is 'ipc', but backend is 'torch', which knows no nodes"),
        ("ipc", "internode", "hop is 'ipc', but on rank 0 "),
        ("nvshmem", "internode", "hop is 'nvshmem', but on rank 0 "),
    ],
)
def test_a_hop_that_cannot_run_is_refused_on_every_rank_alike(
    ranks: Pools, hop: str, backend: str, sentence: str
) -> None:
    if torch.cuda.is_available() and backend == "internode":
        pytest.skip("this machine has CUDA, so that the hop may run")
    said = ranks.run(_refused, 2, hop, backend)
    assert said[0] == said[1]
    assert sentence in said[0]


def _more_ranks_than_the_kernels_take(group: dist.ProcessGroup) -> bool:
    with played(group, 1, TIGHT * 8), mock.patch.object(PlayedKernels, "max_ranks", 1):
        buffer = moe_ep.Buffer(group, backend="internode", hop="ipc", ranks_per_node=1)
        x, idx = torch.ones(4, 8, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 4)
        rows, count, handle, _, _ = buffer.low_latency_dispatch(x, idx, 4, 2, use_fp8=False)
        assert isinstance(rows, torch.Tensor)
        y, _, _ = buffer.low_latency_combine(rows, idx, torch.ones(4, 2), handle)
        buffer.close()
        return count.tolist() == [8] and torch.equal(y, 2 * x)


def test_low_latency_of_more_ranks_than_its_kernels_take_goes_through_the_host(ranks: Pools) -> None:
    assert ranks.run(_more_ranks_than_the_kernels_take, 2) == [True, True]
