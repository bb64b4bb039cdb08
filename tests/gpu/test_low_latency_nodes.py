"""Low-latency calls between nodes do what they do inside one: over CUDA IPC, stored and put over NVSHMEM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist

from moe_ep.backends import internode_low_latency
from tests.distributed.test_low_latency import OPTIONS
from tests.gpu import low_latency_scene, test_low_latency_graphs, test_low_latency_kernels, test_low_latency_ranks
from tests.gpu.low_latency_scene import open_buffer, scene_of
from tests.gpu.nvshmem_ranks import nvshmem_pool
from tests.helpers.ranks import Pool, Pools, RankFailure

pytestmark = pytest.mark.gpu
SHAPES = [(2, 1), (2, 2)]  # (nodes, ranks a node)
NUM_REPLAYS = 200
in_graphs, in_kernels, in_ranks = test_low_latency_graphs, test_low_latency_kernels, test_low_latency_ranks
JOBS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "every routing": (in_kernels._every_routing, ()),
    "every option": (in_kernels._every_option, (OPTIONS,)),
    "dtypes and placements": (in_kernels._dtypes_and_placements, ()),
    "sizes of a large model": (in_kernels._model_shape, ()),
    "two hundred calls": (in_kernels._two_hundred, ()),
    "hooks out of order": (in_graphs._two_batches, (False,)),
    "resets between halves": (in_graphs._reset_between, ()),
    "graphs with hooks": (in_graphs._replays, (1, True, True)),
    "graphs of three calls": (in_graphs._replays, (2, False, False)),
    "a masked rank": (in_ranks._masked, ([1], [0])),
    "a mask behind a call": (in_ranks._masked_behind_a_call, ()),
    "a rank taken in again": (in_ranks._taken_in_again, ()),
}


def _between_nodes(
    group: dist.ProcessGroup, hop: str, ranks_per_node: int, stores: bool, job: Callable[..., Any], *args: Any
) -> Any:
    """A job of ranks of one node, on buffers between nodes."""
    settings = {"backend": "internode", "hop": hop, "ranks_per_node": ranks_per_node}
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(low_latency_scene.SETTINGS, settings))
        patches.enter_context(mock.patch.object(internode_low_latency, "STORES_ACROSS_NODES", stores))
        patches.enter_context(mock.patch.object(test_low_latency_graphs, "NUM_REPLAYS", NUM_REPLAYS))
        return job(group, *args)


class Nodes(NamedTuple):
    """Ranks that stand for nodes, and how they reach each other."""

    run_ranks: Callable[..., list[Any]]
    hop: str
    world: int
    ranks_per_node: int
    stores: bool

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        return self.run_ranks(_between_nodes, self.hop, self.ranks_per_node, self.stores, job, *args)


@pytest.fixture(params=SHAPES, ids=str)
def over_ipc(request: pytest.FixtureRequest, ranks: Pools) -> Nodes:
    num_nodes, ranks_per_node = request.param
    world = num_nodes * ranks_per_node

    def run_ranks(*job: Any) -> list[Any]:
        return ranks.run(job[0], world, *job[1:], timeout_secs=120)

    return Nodes(run_ranks, "ipc", world, ranks_per_node, True)


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def nvshmem_ranks(request: pytest.FixtureRequest) -> Iterator[tuple[Callable[[], Pool], int]]:
    """Processes in which NVSHMEM begins with their first buffer, others after a failure, and how many make a node."""
    num_nodes, ranks_per_node = request.param
    pools: list[Pool] = []

    def pool() -> Pool:
        if not pools or not pools[-1].processes:
            pools.append(nvshmem_pool(num_nodes * ranks_per_node))
        return pools[-1]

    yield pool, ranks_per_node
    for made in pools:
        made.close()


@pytest.fixture(params=[True, False], ids=["stored", "put"])
def over_nvshmem(request: pytest.FixtureRequest, nvshmem_ranks: tuple[Callable[[], Pool], int]) -> Nodes:
    pool, ranks_per_node = nvshmem_ranks[0](), nvshmem_ranks[1]

    def run_ranks(*job: Any) -> list[Any]:
        return pool.run(job[0], pool.size, job[1:], 150.0)

    return Nodes(run_ranks, "nvshmem", pool.size, ranks_per_node, request.param)


def _put_to(group: dist.ProcessGroup) -> list[int]:
    """The ranks that this one puts to."""
    with open_buffer(group) as buffer:
        scene_of(group).round_trip(buffer)
        memory: Any = buffer.backend.low_latency._memory  # type: ignore[union-attr]
        put_to: list[int] = memory.native.put_to()
        return put_to


def test_rows_to_other_nodes_are_stored_where_they_are_reached_and_put_otherwise(over_nvshmem: Nodes) -> None:
    each, size = over_nvshmem.run(_put_to), over_nvshmem.ranks_per_node
    for rank, put_to in enumerate(each):
        others = [peer for peer in range(over_nvshmem.world) if peer // size != rank // size]
        assert put_to == ([] if over_nvshmem.stores else others)


# case E01, E02, E05, F01, I01, I02, T04
@pytest.mark.parametrize("job", JOBS)
def test_calls_over_ipc_do_as_those_inside_a_node(over_ipc: Nodes, job: str) -> None:
    over_ipc.run(JOBS[job][0], *JOBS[job][1])


@pytest.mark.parametrize("job", JOBS)
def test_calls_over_nvshmem_do_as_those_inside_a_node(over_nvshmem: Nodes, job: str) -> None:
    over_nvshmem.run(JOBS[job][0], *JOBS[job][1])


# -- what does not go as it should ------------------------------------------------------------------------------------


def _check_late(nodes: Nodes) -> None:
    text = nodes.run(in_ranks._late)[0]
    assert "low_latency_combine on rank 0" in text
    assert "did not come to the call" in text


def _check_at_odds(nodes: Nodes) -> None:
    of_0, of_1 = nodes.run(in_ranks._at_odds)[:2]
    assert "disagrees on M, H, K, E" in of_0[0]
    assert "but num_max_dispatch_tokens_per_rank is 1" in of_1[1]
    assert "EP rank 1 refused the call" in of_0[2]


def _check_too_many(nodes: Nodes) -> None:
    (many, bad), *others = nodes.run(in_ranks._too_many)
    assert "num_max_dispatch_tokens_per_rank is" in many
    assert "topk_idx[1, 2] is" in bad
    assert others == [("", "")] * (nodes.world - 1)


FAULTS = {"late": _check_late, "at odds": _check_at_odds, "too many": _check_too_many}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_over_ipc_are_told_as_those_inside_a_node(over_ipc: Nodes, fault: str) -> None:
    FAULTS[fault](over_ipc)


def test_memory_between_nodes_does_not_grow_once_a_graph_holds_it(over_ipc: Nodes) -> None:
    """Not over NVSHMEM: what earlier buffers have left may be large enough."""
    for early, late in over_ipc.run(in_graphs._no_room):
        assert "run the call once before the capture" in early
        assert "cannot grow any more" in late


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_over_nvshmem_are_told_as_those_inside_a_node(over_nvshmem: Nodes, fault: str) -> None:
    FAULTS[fault](over_nvshmem)


def _lose(group: dist.ProcessGroup, lost: int, phase: str) -> None:
    """Behind a buffer with a long limit, for devices that begin late."""
    with open_buffer(group) as buffer:
        scene_of(group).round_trip(buffer)
    in_ranks._lose(group, lost, phase)


@pytest.mark.no_mps
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_the_others_go_on_without_a_rank_of_another_node_that_is_killed(phase: str) -> None:
    pool = Pool(4, on_cuda=True)
    try:
        with pytest.raises(RankFailure) as failure:
            pool.run(_between_nodes, 4, ("ipc", 2, True, _lose, 2, phase), 100)
    finally:
        pool.close()
    text = str(failure.value)
    assert "rank 2:\nthe process died" in text, text
    assert not any(f"rank {rank}:\n" in text or f"rank {rank} did not" in text for rank in (0, 1, 3)), text
