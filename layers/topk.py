"""Exact, deterministic top-k: the best score first, equal scores by the lowest index.

A plain floating-point top-k leaves the order of equal scores open, so it may differ between runs, devices and
recompute. Here every score becomes an integer key that no other entry of its row shares:

    key = (ordered(score) << 32) | (N - 1 - index)

where `ordered` maps float32 to int32 and keeps the order. Integer keys without equals have one top-k only. No score
is moved by an epsilon, so scores that are close but not equal keep their order.

Rules: -0.0 equals +0.0; NaN (any sign) counts as the largest value, so every chosen index is valid and distinct
whatever the input; an entry that is masked out loses against every other one, a real -inf included.

Letters: T tokens, E experts, G groups, K chosen experts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_LOWEST_INT32 = -(2**31)  # below ordered(-inf), so only masked entries have it
_HIGHEST_INT32 = 2**31 - 1


def ordered_int32(scores: Tensor) -> Tensor:
    """Map float32 to int32 so that `a < b` holds exactly where `ordered(a) < ordered(b)`.

    Args:
        scores: any shape, float32.

    Returns:
        int32 of the same shape. -0.0 and +0.0 map to 0, every NaN maps to the largest int32, and the smallest int32
        is never used.
    """
    bits = (scores.detach() + 0.0).view(torch.int32)  # adding +0.0 turns -0.0 into +0.0
    # IEEE-754: positive floats already order like their bits; the magnitude of negative ones counts downwards.
    ordered = torch.where(bits < 0, bits ^ _HIGHEST_INT32, bits)
    return ordered.masked_fill(torch.isnan(scores), _HIGHEST_INT32)


def topk_lowest_index(scores: Tensor, k: int, mask: Tensor | None = None) -> Tensor:
    """Indices of the k best entries of each row, best first, ties to the lowest index.

    Example: scores [1, 3, 3, 2], k=3 -> [1, 2, 3].

    Args:
        scores: [..., N] float32.
        k: how many, 0 <= k <= N.
        mask: None, or bool, broadcastable to scores; entries where it is False are chosen only when nothing else
            is left, by index.

    Returns:
        [..., k] int64, distinct within a row.

    Raises:
        ValueError: k is outside [0, N].
    """
    num_entries = scores.shape[-1]
    if not 0 <= k <= num_entries:
        raise ValueError(f"k is {k}, but a row has {num_entries} entries; ask for 0 to {num_entries} of them.")
    ordered = ordered_int32(scores)
    if mask is not None:
        ordered = ordered.masked_fill(~mask, _LOWEST_INT32)
    reversed_index = torch.arange(num_entries - 1, -1, -1, device=scores.device)
    keys = (ordered.to(torch.int64) << 32) | reversed_index
    best = torch.topk(keys, k, dim=-1, largest=True, sorted=True).values
    return (num_entries - 1) - (best & 0xFFFFFFFF)


def group_scores(
    scores_TE: Tensor, num_groups: int, group_score: Literal["top2", "max", "megatron"], num_best: int
) -> Tensor:
    """Score of every group of consecutive experts.

    Args:
        scores_TE: [T, E] float32, the scores (bias included) that experts are chosen by.
        num_groups: G, divides E.
        group_score: "top2" sums the two best of a group (DeepSeek-V3, arXiv:2412.19437, section 2.1.2; the single
            one where a group holds one expert); "max" takes the best (DeepSeek-V2, arXiv:2405.04434, section 2.2.2);
            "megatron" sums the `num_best` best (Megatron-Core).
        num_best: K // group_topk; only "megatron" uses it.

    Returns:
        [T, G] float32.
    """
    grouped_TGN = scores_TE.detach().view(-1, num_groups, scores_TE.shape[-1] // num_groups)
    wanted = {"top2": 2, "max": 1, "megatron": num_best}[group_score]
    best_TGn = torch.topk(grouped_TGN, min(wanted, grouped_TGN.shape[-1]), dim=-1, sorted=True).values
    total_TG = best_TGn[..., 0]
    for position in range(1, best_TGn.shape[-1]):  # added one by one, best first: the same bits on every device
        total_TG = total_TG + best_TGn[..., position]
    return total_TG


def group_mask(scores_TG: Tensor, group_topk: int, num_experts: int) -> Tensor:
    """Which experts lie in the `group_topk` best groups of their token.

    Args:
        scores_TG: [T, G] float32 from `group_scores`.
        group_topk: groups kept per token.
        num_experts: E, a multiple of G.

    Returns:
        [T, E] bool.
    """
    chosen = topk_lowest_index(scores_TG, group_topk)
    keep_TG = torch.zeros_like(scores_TG, dtype=torch.bool).scatter_(-1, chosen, True)
    return keep_TG.repeat_interleave(num_experts // scores_TG.shape[-1], dim=-1)
