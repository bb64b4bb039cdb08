"""Load balancing: auxiliary losses, how they reach the gradient, expert counts, and the bias update.

The losses read the integer routing (before any capacity drop) as a constant and the normalised scores as the
differentiable part, as in Switch Transformer (arXiv:2101.03961, eq. 4) with K experts per token:

    L = coef * E / (K * T) * sum_i count_i * P_i,     P_i = mean over the T tokens of score_i

so perfect balance gives `coef`. Counts are integers; they are summed and compared as integers. Nothing here waits
for the device, and no sum runs over atomics in floating point.

Letters: T tokens, E experts, K slots per token, S sequences, W ranks of the EP group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from moe_ep.autograd.once import once_differentiable


def expert_counts(topk_idx_TK: Tensor, num_experts: int) -> Tensor:
    """Number of (token, slot) pairs per expert.

    Args:
        topk_idx_TK: [T, K] int64; -1 = no expert, counted nowhere.
        num_experts: E.

    Returns:
        [E] int64.
    """
    bins = topk_idx_TK.flatten()
    bins = bins.masked_fill(bins < 0, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=bins.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[:num_experts]


def batch_aux_loss(probs_TE: Tensor, counts_E: Tensor, topk: int, coef: float) -> Tensor:
    """Balance loss over all tokens of this rank.

    Args:
        probs_TE: [T, E] float32, rows sum to 1; rows of padding are 0.
        counts_E: [E] int64, routed pairs; their sum is K times the number of tokens that are not padding.
        topk: K.
        coef: weight of the loss.

    Returns:
        Scalar float32; exactly 0 without tokens. Source: Switch Transformer, arXiv:2101.03961, eq. 4.
    """
    num_tokens = (counts_E.sum() // topk).clamp(min=1)
    load_E = counts_E.to(torch.float32) / (topk * num_tokens)
    mean_prob_E = probs_TE.sum(dim=0) / num_tokens
    return coef * counts_E.numel() * (load_E * mean_prob_E).sum()


def sequence_aux_loss(
    probs_TE: Tensor, topk_idx_TK: Tensor, sequence_idx: Tensor | None, topk: int, coef: float
) -> Tensor:
    """Mean over sequences of the balance loss of each sequence.

    Args:
        probs_TE: [T, E] float32, rows sum to 1; rows of padding are 0.
        topk_idx_TK: [T, K] int64, the row of a padding token is -1.
        sequence_idx: [T] int64, any numbers; tokens with one number are one sequence, wherever they lie.
            None: all tokens are one sequence.
        topk: K.
        coef: weight of the loss.

    Returns:
        Scalar float32; sequences of padding alone do not count, exactly 0 without tokens.
        Source: DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20.
    """
    num_tokens, num_experts = probs_TE.shape
    if sequence_idx is None:
        return batch_aux_loss(probs_TE, expert_counts(topk_idx_TK, num_experts), topk, coef)
    sequence_T = _dense_labels(sequence_idx)  # in [0, T), so T rows hold every sequence
    valid_T = topk_idx_TK[:, 0] >= 0
    tokens_S = torch.zeros(num_tokens, dtype=torch.int64, device=probs_TE.device)
    tokens_S.scatter_add_(0, sequence_T, valid_T.to(torch.int64))
    pair_bins = sequence_T[:, None] * num_experts + topk_idx_TK
    pair_bins = pair_bins.masked_fill(topk_idx_TK < 0, num_tokens * num_experts)
    counts = expert_counts(pair_bins, num_tokens * num_experts)
    num_sequences = (tokens_S > 0).sum().clamp(min=1)
    # sum_s sum_i count_si * P_si, with the sum over tokens outermost: the counts are gathered to the tokens instead of
    # the scores being scattered to the sequences, so the order of the floating-point sum is fixed.
    factor_S = num_experts / (topk * tokens_S.clamp(min=1).to(torch.float32) ** 2 * num_sequences)
    load_SE = counts.view(num_tokens, num_experts) * factor_S[:, None]
    return coef * (probs_TE * load_SE.index_select(0, sequence_T)).sum()


def global_aux_loss(
    probs_TE: Tensor, counts_E: Tensor, topk: int, coef: float, all_reduce: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Balance loss against the load of the whole EP group.

    The counts are summed over the group as integers; the scores stay local and are divided by the mean number of
    tokens per rank. So the mean over ranks of the returned values is the loss of the whole batch, also where ranks
    hold different numbers of tokens. Every rank of the group must take part.

    Args:
        probs_TE: [T, E] float32, rows sum to 1; rows of padding are 0.
        counts_E: [E] int64, routed pairs of this rank.
        topk: K.
        coef: weight of the loss.
        all_reduce: sums an int64 tensor over the group; None = this rank alone.

    Returns:
        Scalar float32; exactly 0 where this rank has no tokens.
        Source: "Demons in the Detail", arXiv:2501.11873 (load over the global batch).
    """
    counts_and_ranks = torch.cat((counts_E, counts_E.new_ones(1)))
    if all_reduce is not None:
        counts_and_ranks = all_reduce(counts_and_ranks)
    total_E, num_ranks = counts_and_ranks[:-1], counts_and_ranks[-1]
    num_tokens = (total_E.sum() // topk).clamp(min=1)
    load_E = total_E.to(torch.float32) / (topk * num_tokens)
    mean_prob_E = probs_TE.sum(dim=0) * num_ranks / num_tokens
    return coef * total_E.numel() * (load_E * mean_prob_E).sum()


def z_loss(logits_TE: Tensor, valid_T: Tensor | None, coef: float) -> Tensor:
    """coef * mean over tokens of logsumexp(logits)^2, which keeps router logits small.

    Args:
        logits_TE: [T, E] float32.
        valid_T: [T] bool, False = padding; None = no padding.
        coef: weight of the loss.

    Returns:
        Scalar float32; exactly 0 without tokens. Source: ST-MoE, arXiv:2202.08906, eq. 5.
    """
    squares_T = torch.logsumexp(logits_TE, dim=-1) ** 2
    if valid_T is None:
        return coef * squares_T.sum() / max(squares_T.numel(), 1)
    return coef * squares_T.masked_fill(~valid_T, 0.0).sum() / valid_T.sum().clamp(min=1)


def carry_aux_loss(
    topk_weights_TK: Tensor,
    aux_loss: Tensor | None,
    counts_E: Tensor,
    aux_loss_scale: float,
    accumulate: Callable[[Tensor], None],
    anchor: Tensor | None = None,
) -> Tensor:
    """Hang the auxiliary loss and the counting on the routing weights.

    The weights pass through unchanged. When their backward runs, `aux_loss` receives the gradient `aux_loss_scale`,
    whatever gradient the weights receive, and `accumulate(counts_E)` is called. Doing both in backward makes activation
    recompute (which runs the forward twice and the backward once) right without knowing about it. A second backward
    through a retained graph does not count again. If nothing here needs a gradient, the anchor included, no backward
    will come and nothing is counted: a forward alone cannot tell whether it is a recompute.

    Args:
        topk_weights_TK: [T, K] float32.
        aux_loss: scalar float32 or None.
        counts_E: [E] int64.
        aux_loss_scale: gradient handed to `aux_loss`.
        accumulate: called with counts_E.
        anchor: a tensor that requires a gradient (and gets none), to bring the weights into the graph where they and
            the loss need no gradient themselves; None = leave them outside.

    Returns:
        [T, K] float32, equal to topk_weights_TK.
    """
    if not any(tensor is not None and tensor.requires_grad for tensor in (topk_weights_TK, aux_loss, anchor)):
        return topk_weights_TK
    carried = _CarryAuxLoss.apply(topk_weights_TK, aux_loss, counts_E, aux_loss_scale, accumulate, anchor)  # type: ignore[no-untyped-call]
    return cast(Tensor, carried)


class _CarryAuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        topk_weights_TK: Tensor,
        aux_loss: Tensor | None,
        counts_E: Tensor,
        aux_loss_scale: float,
        accumulate: Callable[[Tensor], None],
        anchor: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(counts_E)
        ctx.aux_loss_scale = aux_loss_scale
        ctx.accumulate = accumulate
        ctx.counted = False
        return topk_weights_TK.view_as(topk_weights_TK)

    @staticmethod
    @once_differentiable("TopKRouter")
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        (counts_E,) = ctx.saved_tensors
        if not ctx.counted:
            ctx.counted = True
            ctx.accumulate(counts_E)
        grad_aux = grad_TK.new_full((), ctx.aux_loss_scale) if ctx.needs_input_grad[1] else None
        grad_weights = grad_TK if ctx.needs_input_grad[0] else None
        return grad_weights, grad_aux, None, None, None, None  # no gradient: counts, the two settings, the anchor


@torch.no_grad()
def step_expert_bias(expert_bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """Raise the bias of experts below the mean load by `rate`, lower the others, in place.

    The comparison is exact: E * count_i against the total, in integers. An expert at the mean keeps its bias.

    Args:
        expert_bias_E: [E] float32.
        counts_E: [E] int64, summed over all ranks.
        rate: step size.

    Source: auxiliary-loss-free balancing, arXiv:2408.15664, algorithm 1.
    """
    direction_E = torch.sign(counts_E.sum() - counts_E.numel() * counts_E)
    expert_bias_E.add_(direction_E.to(torch.float32), alpha=rate)


def _dense_labels(sequence_idx: Tensor) -> Tensor:
    """Renumber arbitrary integers [T] as 0, 1, 2, ... in ascending order, without a host wait."""
    ordered, order = torch.sort(sequence_idx)
    is_new = torch.zeros_like(ordered)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(ordered).scatter_(0, order, is_new.cumsum(0))
