"""Capacity per expert: the limit, who is dropped, what a dropped slot becomes."""

from __future__ import annotations

import random

import pytest
import torch

from moe_ep.layers.capacity import apply_capacity, expert_capacity
from tests.unit.router_helpers import logit_router, softmax_logits


@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "factor", "expected"),
    [
        (8, 2, 4, 1.0, 4),
        (8, 2, 4, 1.25, 5),
        (10, 1, 1, 1.1, 11),
        (7, 2, 4, 1.0, 4),
        (1, 1, 8, 1.0, 1),
        (0, 2, 4, 1.5, 0),
        (4096, 8, 256, 0.5, 64),
    ],
)
def test_capacity_is_the_even_share_times_the_factor_rounded_up(
    num_tokens: int, topk: int, num_experts: int, factor: float, expected: int
) -> None:
    assert expert_capacity(torch.tensor(num_tokens), topk, num_experts, factor).item() == expected


def plain_drops(
    ids: list[list[int]], weights: list[list[float]], capacity: int, by_weight: bool
) -> set[tuple[int, int]]:
    """Oracle: the (token, slot) pairs that stay, expert by expert."""
    kept = set()
    for expert in {expert for row in ids for expert in row if expert >= 0}:
        pairs = [(token, slot) for token, row in enumerate(ids) for slot, chosen in enumerate(row) if chosen == expert]
        if by_weight:
            pairs.sort(key=lambda pair: (-weights[pair[0]][pair[1]], pair[0]))
        kept.update(pairs[:capacity])
    return kept


@pytest.mark.parametrize("drop_policy", ["position", "weight"])
@pytest.mark.parametrize("seed", range(8))
def test_drops_agree_with_a_plain_loop(drop_policy: str, seed: int) -> None:
    generator = random.Random(seed)
    num_experts, topk, num_tokens = 5, 2, 17
    ids = [generator.sample(range(num_experts), topk) for _ in range(num_tokens)]
    for token in generator.sample(range(num_tokens), 3):
        ids[token] = [-1, -1]
    weights = [[generator.choice([0.125, 0.25, 0.5]) for _ in range(topk)] for _ in range(num_tokens)]
    capacity = -(-(num_tokens - 3) * topk * 3 // (num_experts * 4))
    new_ids, new_weights, num_dropped = apply_capacity(
        torch.tensor(ids), torch.tensor(weights), num_experts=num_experts, capacity_factor=0.75,
        drop_policy=drop_policy,  # type: ignore[arg-type]
    )  # fmt: skip
    kept = plain_drops(ids, weights, capacity, drop_policy == "weight")
    for token in range(num_tokens):
        for slot in range(topk):
            stays = (token, slot) in kept
            assert new_ids[token, slot].item() == (ids[token][slot] if stays else -1)
            assert new_weights[token, slot].item() == (weights[token][slot] if stays else 0.0)
    assert num_dropped.item() == (num_tokens - 3) * topk - len(kept)


@pytest.mark.parametrize(("drop_policy", "kept"), [("position", [0, 1]), ("weight", [1, 3])])
def test_router_drops_without_renormalising_and_without_gradient(drop_policy: str, kept: list[int]) -> None:
    """Case Q01's limit: all four tokens want expert 0, which may take two; drops are counted and reported."""
    router = logit_router(2, topk=1, capacity_factor=1.0, drop_policy=drop_policy)
    logits = softmax_logits([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.8, 0.2]]).requires_grad_()
    ids, weights = router(logits)
    dropped = [token for token in range(4) if token not in kept]
    assert (ids[kept] == 0).all()
    assert (ids[dropped] == -1).all()
    assert (weights[dropped] == 0).all()
    assert torch.allclose(weights[kept, 0], torch.softmax(logits, 1)[kept, 0])
    assert router.last_dropped.item() == 2
    assert router.last_counts.tolist() == [4, 0]  # what was chosen, before the drop
    weights.sum().backward()
    assert logits.grad is not None
    assert (logits.grad[dropped] == 0).all()
    assert (logits.grad[kept] != 0).all()
    assert router.tokens_per_expert.tolist() == [4, 0]


def test_without_a_factor_nothing_is_dropped() -> None:
    """Case Q01: dropless is the default."""
    router = logit_router(8, topk=1)
    logits = torch.zeros(4096, 8)
    logits[:, 7] = 1.0
    ids, _ = router(logits)
    assert (ids == 7).all()
    assert router.last_dropped.item() == 0


def test_equal_weights_keep_the_first_tokens() -> None:
    ids = torch.zeros(4, 1, dtype=torch.int64)
    new_ids, _, _ = apply_capacity(
        ids, torch.tensor([[0.5], [0.5], [0.5], [0.5]]), num_experts=2, capacity_factor=1.0, drop_policy="weight"
    )
    assert new_ids.flatten().tolist() == [0, 0, -1, -1]
