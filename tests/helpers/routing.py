"""Routings that break exchanges: skew, holes, empty ranks, duplicates. Deterministic in (name, seed)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Generator = torch.Generator


def _random(num_tokens: int, num_topk: int, num_experts: int, g: Generator) -> Tensor:
    """Distinct experts a token where there are enough of them."""
    scores = torch.rand(num_tokens, max(num_experts, num_topk), generator=g)
    return scores.argsort(dim=1)[:, :num_topk] % num_experts


def _skewed(num_tokens: int, num_topk: int, num_experts: int, g: Generator) -> Tensor:
    """Zipf-like: expert e with weight 1 / (e + 1), drawn without replacement."""
    weight = 1.0 / torch.arange(1, max(num_experts, num_topk) + 1)
    if num_tokens == 0:
        return torch.zeros(0, num_topk, dtype=torch.int64)
    drawn = torch.multinomial(weight.expand(num_tokens, -1), num_topk, generator=g)
    return drawn % num_experts


def _all_to_last(num_tokens: int, num_topk: int, num_experts: int, g: Generator) -> Tensor:
    return torch.full((num_tokens, num_topk), num_experts - 1)


def _all_unused(num_tokens: int, num_topk: int, num_experts: int, g: Generator) -> Tensor:
    return torch.full((num_tokens, num_topk), -1)


def _holes(num_tokens: int, num_topk: int, num_experts: int, g: Generator) -> Tensor:
    """A third of the slots unused, and every fifth token with no expert at all."""
    ids = _random(num_tokens, num_topk, num_experts, g)
    ids[torch.rand(ids.shape, generator=g) < 1 / 3] = -1
    ids[::5] = -1
    return ids


def _duplicates(num_tokens: int, num_topk: int, num_experts: int, g: Generator) -> Tensor:
    """Slots drawn with replacement from few experts, so that many tokens name one twice."""
    return torch.randint(0, min(num_experts, 3), (num_tokens, num_topk), generator=g)


ROUTINGS: dict[str, Callable[[int, int, int, Generator], Tensor]] = {
    "random": _random,
    "skewed": _skewed,
    "all_to_last": _all_to_last,
    "all_unused": _all_unused,
    "holes": _holes,
    "duplicates": _duplicates,
}

# Tokens of each rank, cycled: ragged, with ranks that have none.
TOKEN_COUNTS: dict[str, tuple[int, ...]] = {
    "equal": (6,),
    "ragged": (5, 3, 0, 7),
    "one_rank_only": (9, 0, 0, 0, 0, 0, 0, 0),
    "none": (0,),
}


def make_inputs(
    routing: str,
    tokens: str,
    world: int,
    hidden: int,
    num_topk: int,
    num_experts: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(x [T, H], topk_idx [T, K], topk_weights [T, K]) of every rank; weights are not uniform and not normalised."""
    g = torch.Generator().manual_seed(seed)
    counts = TOKEN_COUNTS[tokens]
    inputs = []
    for rank in range(world):
        num_tokens = counts[rank % len(counts)]
        x = torch.randn(num_tokens, hidden, generator=g, dtype=torch.float64).to(dtype)
        idx = ROUTINGS[routing](num_tokens, num_topk, num_experts, g)
        weights = torch.rand(num_tokens, num_topk, generator=g, dtype=torch.float64) + 0.1
        inputs.append((x, idx, weights.to(torch.float64 if dtype == torch.float64 else torch.float32)))
    return inputs
