"""Expert counts and the bias update: once per backward, never in evaluation, exact integers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ep.layers import balance
from moe_ep.layers.router import TopKRouter
from tests.unit.router_helpers import assert_close, logit_router

RATE = 1e-3


def bias_router(num_experts: int, topk: int) -> TopKRouter:
    return logit_router(num_experts, topk=topk, score_function="sigmoid", expert_bias=True, bias_update_rate=RATE)


def logits_for(rows: list[list[int]], num_experts: int) -> Tensor:
    """Logits that route token t to the experts rows[t], best first."""
    logits = torch.full((len(rows), num_experts), -3.0)
    for token, experts in enumerate(rows):
        for slot, expert in enumerate(experts):
            logits[token, expert] = 2.0 - slot
    return logits


@pytest.mark.parametrize(
    ("recompute", "x_requires_grad"),  # reentrant checkpointing needs an input that requires grad
    [(None, True), (None, False), ("reentrant", True), ("non-reentrant", True), ("non-reentrant", False)],
)
def test_recompute_counts_every_token_once(recompute: str | None, x_requires_grad: bool) -> None:
    """Case B01: counts [4,2,1,1] and bias change [-u, 0, +u, +u]."""
    router = bias_router(4, 2)
    logits = logits_for([[0, 1], [0, 1], [0, 2], [0, 3]], 4).requires_grad_(x_requires_grad)
    if recompute is None:
        _, weights = router(logits)
    else:
        _, weights = checkpoint(router, logits, use_reentrant=recompute == "reentrant")
    assert router.tokens_per_expert.tolist() == [0, 0, 0, 0]  # counted when the backward runs
    weights.sum().backward()
    assert router.tokens_per_expert.tolist() == [4, 2, 1, 1]
    assert router.last_counts.tolist() == [4, 2, 1, 1]
    router.update_expert_bias()
    assert router.expert_bias is not None
    assert_close(router.expert_bias, [-RATE, 0.0, RATE, RATE], 1e-9)
    assert router.tokens_per_expert.tolist() == [0, 0, 0, 0]


def test_selective_recompute_sees_the_same_operations_twice() -> None:
    """Case B01: a checkpoint that saves some operations only and compares the sequence."""
    router = bias_router(4, 2)
    logits = logits_for([[0, 1], [0, 1], [0, 2], [0, 3]], 4).requires_grad_()
    saved = [torch.ops.aten.mm.default, torch.ops.aten.topk.default]

    def contexts() -> object:
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(saved)

    _, weights = checkpoint(router, logits, use_reentrant=False, context_fn=contexts)
    weights.sum().backward()
    assert router.tokens_per_expert.tolist() == [4, 2, 1, 1]


def test_gradient_accumulation_adds_up_and_a_second_backward_does_not() -> None:
    router = bias_router(2, 1)
    _, weights = router(logits_for([[0], [0], [1]], 2))
    weights.sum().backward(retain_graph=True)
    weights.sum().backward()
    assert router.tokens_per_expert.tolist() == [2, 1]
    router(logits_for([[1], [1], [1]], 2))[1].sum().backward()
    assert router.tokens_per_expert.tolist() == [2, 4]


def test_evaluation_leaves_counts_and_losses_alone() -> None:
    """Case B02; train() under no_grad behaves like evaluation."""
    router = logit_router(
        2, topk=1, score_function="sigmoid", expert_bias=True, bias_update_rate=RATE, aux_loss_coef=0.1
    )
    router(logits_for([[0], [0], [0], [1]], 2))[1].sum().backward()
    reported = router.last_losses["aux_loss"].clone()
    ten = logits_for([[1]] * 10, 2)
    router.eval()
    router(ten)[1].sum().backward()
    with torch.no_grad():
        router(ten)
        router.train()
        router(ten)
    assert router.tokens_per_expert.tolist() == [3, 1]
    assert torch.equal(router.last_losses["aux_loss"], reported)
    router.update_expert_bias()
    assert router.expert_bias is not None
    assert_close(router.expert_bias, [-RATE, RATE], 1e-9)


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_a_frozen_router_counts_in_its_backward(recompute: str | None) -> None:
    """Case B01: neither the router nor x needs a gradient, what lies behind it does."""
    router, behind = bias_router(2, 1), torch.ones(3, 1, requires_grad=True)
    router.weight.requires_grad_(False)

    def block(logits: Tensor, behind: Tensor) -> Tensor:
        weights: Tensor = router(logits)[1]
        return weights * behind

    logits = logits_for([[0], [0], [1]], 2)
    y = (
        checkpoint(block, logits, behind, use_reentrant=recompute == "reentrant")
        if recompute
        else block(logits, behind)
    )
    assert router.tokens_per_expert.tolist() == [0, 0]
    y.sum().backward()
    assert router.tokens_per_expert.tolist() == [2, 1]
    assert behind.grad is not None
    assert router.weight.grad is None


def test_a_frozen_router_without_a_bias_to_update_stays_out_of_the_graph() -> None:
    router = logit_router(2, topk=1, score_function="sigmoid")
    router.weight.requires_grad_(False)
    _, weights = router(logits_for([[0], [0], [1]], 2))
    assert not weights.requires_grad
    assert router.tokens_per_expert.tolist() == [0, 0]
    assert router.last_counts.tolist() == [2, 1]
    router = bias_router(2, 1).eval()
    router.weight.requires_grad_(False)
    assert not router(logits_for([[0]], 2))[1].requires_grad


def test_counts_beyond_bf16_decide_the_sign() -> None:
    """Case B08: [257, 256] gives [-u, +u]; in bfloat16 both would be 256."""
    router = bias_router(2, 1).bfloat16()
    router(logits_for([[0]] * 257 + [[1]] * 256, 2).bfloat16())[1].sum().backward()
    assert router.tokens_per_expert.dtype == torch.int64
    assert router.tokens_per_expert.tolist() == [257, 256]
    router.update_expert_bias()
    assert router.expert_bias is not None
    assert_close(router.expert_bias, [-RATE, RATE], 1e-9)


def test_counts_of_64_ranks_are_summed_exactly() -> None:
    """Case B08: 64 parts between 608 and 676, reduced as integers."""
    router = bias_router(2, 1)
    parts = [608 + (37 * rank) % 69 for rank in range(64)]
    total = sum(parts)
    router.tokens_per_expert.copy_(torch.tensor([parts[0], total + 1]))
    seen: list[Tensor] = []

    def all_reduce(counts: Tensor) -> Tensor:
        assert counts.dtype == torch.int64
        for part in parts[1:]:
            counts += torch.tensor([part, 0])
        seen.append(counts)
        return counts

    router.update_expert_bias(all_reduce)
    assert seen[0].tolist() == [total, total + 1]
    assert router.expert_bias is not None
    assert_close(router.expert_bias, [RATE, -RATE], 1e-9)
    assert router.tokens_per_expert.tolist() == [0, 0]


def test_an_expert_at_the_mean_keeps_its_bias() -> None:
    bias = torch.zeros(4)
    balance.step_expert_bias(bias, torch.tensor([10**12, 10**12 + 1, 10**12 - 1, 10**12]), RATE)
    assert_close(bias, [0.0, -RATE, RATE, 0.0], 1e-9)


def test_without_a_bias_the_update_only_resets_the_counts() -> None:
    router = logit_router(2, topk=1)
    router(logits_for([[0], [1]], 2))[1].sum().backward()
    assert router.tokens_per_expert.tolist() == [1, 1]

    def never(counts: Tensor) -> Tensor:
        raise AssertionError("no bias, so nothing to reduce")

    router.update_expert_bias(never)
    assert router.tokens_per_expert.tolist() == [0, 0]


def test_duplicate_and_missing_ids_are_counted_as_they_stand() -> None:
    assert balance.expert_counts(torch.tensor([[1, 1], [-1, 0]]), 3).tolist() == [1, 2, 0]
