"""Capacity limit per expert: which (token, slot) pairs are dropped when an expert has too many.

The default of the layer is dropless; this runs only when `router.capacity_factor` is set. It works on sorted keys of
T*K entries and needs no [T, E, capacity] mask and no host wait.

Letters: T tokens, K slots per token, E experts.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from moe_ep.layers.topk import ordered_int32

_FACTOR_DENOMINATOR_LIMIT = 10**6  # keeps the integer arithmetic far inside int64


def expert_capacity(num_tokens: Tensor, topk: int, num_experts: int, capacity_factor: float) -> Tensor:
    """Pairs that one expert may take: ceil(num_tokens * K / E * factor).

    Computed in integers with the factor as the decimal that the user wrote, so that 10 * 1.1 is 11 and not 12.
    Source of the formula: GShard, arXiv:2006.16668, in Megatron-Core's form.

    Args:
        num_tokens: scalar int64, tokens that are not padding.
        topk: K.
        num_experts: E.
        capacity_factor: > 0, resolved to six decimals.

    Returns:
        Scalar int64 on the device of `num_tokens`.
    """
    # Nobody means more than 10,000 times the even share, and the products must fit 64 bits.
    factor = Fraction(repr(min(float(capacity_factor), 1e4))).limit_denominator(_FACTOR_DENOMINATOR_LIMIT)
    numerator, denominator = topk * factor.numerator, num_experts * factor.denominator
    return -((-num_tokens * numerator) // denominator)


def position_in_expert(topk_idx_TK: Tensor, priority_TK: Tensor | None, num_experts: int) -> Tensor:
    """How many pairs of the same expert stand before each pair.

    Args:
        topk_idx_TK: [T, K] int64, -1 = no expert.
        priority_TK: None: the first token comes first. [T, K] float32: the highest comes first, then the first token.
        num_experts: E.

    Returns:
        [T, K] int64; for -1 slots the number has no meaning.
    """
    flat_idx = topk_idx_TK.flatten()
    bins = flat_idx.masked_fill(flat_idx < 0, num_experts)
    keys = bins << 32
    if priority_TK is not None:
        keys = keys - ordered_int32(priority_TK).flatten()  # |ordered| < 2**31, so bins never meet
    order = torch.argsort(keys, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=bins.device)
    counts.scatter_add_(0, bins, torch.ones_like(bins))
    first_of_bin = counts.cumsum(0) - counts
    rank_sorted = torch.arange(bins.numel(), device=bins.device) - first_of_bin[bins[order]]
    return torch.empty_like(bins).scatter_(0, order, rank_sorted).view_as(topk_idx_TK)


def apply_capacity(
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    num_experts: int,
    capacity_factor: float,
    drop_policy: Literal["weight", "position"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Drop the pairs that exceed the capacity of their expert.

    A dropped slot becomes id -1 with weight 0 and gets no gradient; the other weights of the token stay as they are.
    Capacity counts the tokens of this rank that have an expert at all (padding does not count).

    Args:
        topk_idx_TK: [T, K] int64, -1 = no expert.
        topk_weights_TK: [T, K] float32.
        num_experts: E.
        capacity_factor: > 0.
        drop_policy: "position" keeps the first tokens, "weight" the heaviest (equal weights: the first token).

    Returns:
        (topk_idx_TK, topk_weights_TK, num_dropped): the last a scalar int64.
    """
    topk = topk_idx_TK.shape[1]
    routed_TK = topk_idx_TK >= 0
    num_tokens = routed_TK.any(dim=1).sum()
    capacity = expert_capacity(num_tokens, topk, num_experts, capacity_factor)
    priority_TK = topk_weights_TK.detach().float() if drop_policy == "weight" else None
    keep_TK = (position_in_expert(topk_idx_TK, priority_TK, num_experts) < capacity) & routed_TK
    num_dropped = routed_TK.sum() - keep_TK.sum()
    kept_weights_TK = torch.where(keep_TK, topk_weights_TK, torch.zeros_like(topk_weights_TK))
    return topk_idx_TK.masked_fill(~keep_TK, -1), kept_weights_TK, num_dropped
