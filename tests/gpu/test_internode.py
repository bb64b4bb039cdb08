"""The kernels between nodes: the conformance suite, ranks that stand for nodes or share them, over both hops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep.backends import internode_kernels
from tests.distributed.conformance import check_every_routing
from tests.gpu.nvshmem_ranks import nvshmem_pool
from tests.helpers.compare import assert_same_bits
from tests.helpers.internode_jobs import as_torch_does, low_level
from tests.helpers.ranks import Pool, Pools
from tests.helpers.routing import ROUTINGS, TOKEN_COUNTS

pytestmark = pytest.mark.gpu
SHAPES = [(2, 1), (3, 1), (1, 2), (2, 2), (2, 4), (4, 2)]  # (nodes, ranks a node)
ROOMY, TIGHT = 1 << 22, 2048  # bytes of a rail: one round that holds everything, and many
CASES = [("compact", torch.bfloat16), ("expert_major", torch.bfloat16), ("expert_major", torch.float32)]


def _every_routing(
    group: dist.ProcessGroup,
    hop: str,
    ranks_per_node: int,
    layout: str,
    dtype: torch.dtype,
    exact: bool,
    staging_bytes: int,
) -> int:
    with mock.patch.object(internode_kernels, "STAGING_BYTES", staging_bytes):
        return check_every_routing(group, layout, dtype, ranks_per_node, hop, exact, "cuda")


NUM_CHECKS = len(ROUTINGS) * len(TOKEN_COUNTS)


@pytest.mark.parametrize(("layout", "dtype"), CASES)
@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), SHAPES)
def test_rows_sums_and_gradients_are_those_of_the_loops(
    ranks: Pools, say: Callable[[str], None], num_nodes: int, ranks_per_node: int, layout: str, dtype: torch.dtype
) -> None:
    world, args = num_nodes * ranks_per_node, ("ipc", ranks_per_node, layout, dtype, False, ROOMY)
    say(ranks.run(_described, world, "ipc", ranks_per_node)[0])
    assert ranks.run(_every_routing, world, *args, timeout_secs=100) == [NUM_CHECKS] * world


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 1), (3, 1), (2, 2)])
def test_rounds_of_few_rows_give_the_same(ranks: Pools, num_nodes: int, ranks_per_node: int) -> None:
    world, args = num_nodes * ranks_per_node, ("ipc", ranks_per_node, "expert_major", torch.bfloat16, False, TIGHT)
    assert ranks.run(_every_routing, world, *args, timeout_secs=100) == [NUM_CHECKS] * world


def test_exact_sums_do_not_know_of_nodes(ranks: Pools) -> None:
    args = ("ipc", 2, "expert_major", torch.bfloat16, True, ROOMY)
    assert ranks.run(_every_routing, 4, *args, timeout_secs=100) == [NUM_CHECKS] * 4


# -- as torch.distributed does it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 1), (3, 1), (2, 2), (4, 1)])
def test_many_tokens_give_what_torch_gives_and_cross_once_for_each_node(
    ranks: Pools, num_nodes: int, ranks_per_node: int, layout: str
) -> None:
    world, args = num_nodes * ranks_per_node, ("ipc", "cuda", ranks_per_node, layout, 700, 1024)
    assert all(num > 0 for num in ranks.run(as_torch_does, world, *args, timeout_secs=100))


def test_a_token_of_a_large_node_has_more_terms_than_the_ring_would_hold_for_its_slots(ranks: Pools) -> None:
    args = ("ipc", "cuda", 16, "compact", 160, 4096, 16)  # 8 KiB a row, of which a ring holds 8; some tokens need more
    assert ranks.run(as_torch_does, 16, *args, timeout_secs=100) == [0] * 16


@pytest.mark.parametrize(("world", "ranks_per_node"), [(2, 1), (3, 1), (4, 2)])
def test_every_other_call_gives_what_torch_gives(ranks: Pools, world: int, ranks_per_node: int) -> None:
    expected = ranks.run(low_level, world, "torch", "cpu", ranks_per_node)
    actual = ranks.run(low_level, world, "ipc", "cuda", ranks_per_node)
    for theirs, ours in zip(expected, actual, strict=True):
        for number, (one, two) in enumerate(zip(theirs, ours, strict=True)):
            assert_same_bits(two, one, f"result {number}")


def _with_one_connection(group: dist.ProcessGroup, layout: str) -> int:
    """Every stream of the process feeds one queue of the GPU; calls of ten rounds and more."""
    with mock.patch.object(internode_kernels, "STAGING_BYTES", 1 << 18):
        return as_torch_does(group, "ipc", "cuda", 1, layout, 700, 1024)


@pytest.mark.parametrize("layout", ["compact", "expert_major"])
def test_one_connection_to_the_gpu_is_enough(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    pool = Pool(2, on_cuda=True)
    try:
        assert all(num > 0 for num in pool.run(_with_one_connection, 2, (layout,), 100))
    finally:
        pool.close()


# -- ranks that are missing -------------------------------------------------------------------------------------------


def _skips_a_call(group: dist.ProcessGroup) -> list[str]:
    """Rank 1 leaves a combine out; then all reset, and the buffer works."""
    sentences = []
    with moe_ep.Buffer(group, backend="internode", hop="ipc", ranks_per_node=1, timeout_secs=2) as buffer:
        x, idx = torch.ones(64, 128, device="cuda"), torch.arange(128, device="cuda").view(64, 2) % 4
        for _ in range(2):
            out = moe_ep.dispatch(buffer, x, idx, None, num_experts=4, layout="compact")
            calls = buffer.backend._calls  # type: ignore[attr-defined]
            skipped = mock.patch.object(calls, "combine", return_value=torch.empty_like(x))
            with skipped if buffer.rank == 1 else mock.MagicMock():
                y = moe_ep.combine(buffer, out.x, out.handle)
            torch.cuda.synchronize()
            if buffer.rank == 0:
                assert bool(y.isnan().all())
                with pytest.raises(moe_ep.EPTimeoutError) as caught:
                    buffer.check()
                sentences.append(str(caught.value))
            dist.barrier(group)
            buffer.reset()
            again = moe_ep.dispatch(buffer, x, idx, None, num_experts=4, layout="compact")
            assert bool((again.x == 1).all())
            torch.cuda.synchronize()
            buffer.check()
    return sentences


def test_a_rank_of_another_node_that_does_not_come_is_named_and_reset_makes_the_buffer_usable(ranks: Pools) -> None:
    sentences = ranks.run(_skips_a_call, 2)[0]
    assert len(sentences) == 2
    for sentence in sentences:
        assert "rank 1, of this rail in node 1, did not come to the call" in sentence
        assert "combine on rank 0 of the EP group of ranks [0, 1] failed at its limit of 2 s" in sentence


# -- over NVSHMEM -----------------------------------------------------------------------------------------------------


def _described(group: dist.ProcessGroup, hop: str, ranks_per_node: int) -> str:
    """Topology and transport of a rank."""
    with moe_ep.Buffer(group, backend="internode", hop=hop, ranks_per_node=ranks_per_node, timeout_secs=60) as buffer:
        return f"internode, {ranks_per_node} ranks a node: {buffer!r}"


class _OverNvshmem(NamedTuple):
    """Processes in which NVSHMEM has begun, `ranks_per_node` of them a node."""

    pool: Pool
    ranks_per_node: int

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool.run(function, self.pool.size, args, 150.0)


@pytest.fixture(scope="module", params=[(2, 1), (2, 2)], ids=["2-1", "2-2"])
def over_nvshmem(request: pytest.FixtureRequest, say: Callable[[str], None]) -> Iterator[_OverNvshmem]:
    num_nodes, ranks_per_node = request.param
    pool = nvshmem_pool(num_nodes * ranks_per_node)
    for line in pool.run(_described, pool.size, ("nvshmem", ranks_per_node), 120.0):
        say(line)
    yield _OverNvshmem(pool, ranks_per_node)
    pool.close()


@pytest.mark.parametrize(("layout", "dtype"), CASES)
def test_rows_sums_and_gradients_over_nvshmem(over_nvshmem: _OverNvshmem, layout: str, dtype: torch.dtype) -> None:
    checks = over_nvshmem.run(_every_routing, "nvshmem", over_nvshmem.ranks_per_node, layout, dtype, False, ROOMY)
    assert checks == [NUM_CHECKS] * over_nvshmem.pool.size


def test_rounds_of_few_rows_over_nvshmem(over_nvshmem: _OverNvshmem) -> None:
    args = ("nvshmem", over_nvshmem.ranks_per_node, "expert_major", torch.bfloat16, False, TIGHT)
    assert over_nvshmem.run(_every_routing, *args) == [NUM_CHECKS] * over_nvshmem.pool.size


@pytest.mark.parametrize("layout", ["compact", "expert_major"])
def test_many_tokens_over_nvshmem(over_nvshmem: _OverNvshmem, layout: str) -> None:
    args = ("nvshmem", "cuda", over_nvshmem.ranks_per_node, layout, 700, 1024)
    assert all(num > 0 for num in over_nvshmem.run(as_torch_does, *args))
