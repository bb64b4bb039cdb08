"""torch.compile and recompute around the exchange on the kernels, W = 2: the cases of tests/distributed on CUDA."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_wrappers_checkpoint import COUNTED, MODES, counted_tokens, under_a_flop_counter
from tests.distributed.test_wrappers_compile import TOKENS, compiled_and_eager
from tests.helpers.ranks import Pools

pytestmark = pytest.mark.gpu
BACKEND = "intranode"
LIMIT_SECS = 110


def compiled(
    ranks: Pools,
    tokens: tuple[int, ...],
    options: dict[str, Any],
    router: dict[str, Any] | None = None,
    compiler: tuple[str, float] = ("aot_eager", 0.0),
) -> list[tuple[list[int], int]]:
    """(frames compiled after each step, graph breaks) of each rank; values are compared on the ranks."""
    arguments = (tokens, *compiler, options, router, BACKEND)
    return ranks.run(compiled_and_eager, 2, *arguments, timeout_secs=LIMIT_SECS)


def test_the_global_aux_loss_is_in_the_graph_with_its_exchange(ranks: Pools) -> None:  # case O01
    for frames, breaks in compiled(ranks, TOKENS[:4], {"fullgraph": True}, {"global_aux_loss_coef": 0.1}):
        assert frames[-1] <= 2
        assert breaks == 0


def test_dynamic_from_the_start_compiles_once(ranks: Pools) -> None:  # case O01
    for frames, breaks in compiled(ranks, TOKENS[:3], {"fullgraph": True, "dynamic": True}):
        assert frames[-1] == frames[0]
        assert breaks == 0


def test_without_fullgraph_the_graph_breaks_around_dispatch_and_stays_right(ranks: Pools) -> None:  # case O01
    for frames, breaks in compiled(ranks, TOKENS[:5], {}):
        assert frames[-1] == frames[2]
        assert breaks > 0


def test_ranks_may_compile_for_no_token_and_for_one(ranks: Pools) -> None:
    results = compiled(ranks, (0, 5, 0), {"fullgraph": True})
    assert max(frames[-1] for frames, _ in results) <= 3


def test_inductor_agrees_with_eager(ranks: Pools) -> None:  # case O01
    results = compiled(ranks, TOKENS[:2], {"fullgraph": True}, compiler=("inductor", 1e-12))
    assert max(frames[-1] for frames, _ in results) <= 2


@pytest.mark.parametrize("frozen", ["router and x", "layer and x"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "reentrant"])  # that one needs an x with a gradient
def test_recompute_counts_once_where_the_router_needs_no_gradient(ranks: Pools, mode: str, frozen: str) -> None:
    assert ranks.run(counted_tokens, 2, mode, frozen, BACKEND) == [COUNTED] * 2  # case B01


@pytest.mark.parametrize("world", [1, 2])
def test_an_exchange_that_is_watched_gives_the_same_bits(ranks: Pools, world: int) -> None:
    ranks.run(under_a_flop_counter, world, BACKEND)
