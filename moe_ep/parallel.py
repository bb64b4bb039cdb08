"""Gradients when experts are shared between ranks: what to average over whom, and the norm over all of it.

A parameter with `allreduce = False` (the convention of Megatron-Core; `GroupedExperts` sets it) is an expert's: its
gradient already is the sum over the tokens of all ranks of the EP group. Every other parameter is replicated and its
gradient holds this rank's tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether the parameter belongs to the experts of this rank (`allreduce = False`)."""
    return getattr(parameter, "allreduce", True) is False


def reduce_gradients(
    parameters: Iterable[nn.Parameter],
    group: dist.ProcessGroup | None,
    expert_group: dist.ProcessGroup | None = None,
) -> None:
    """Turns per-rank gradients into those of the loss averaged over the ranks of `group`, in place. Collective.

    Replicated parameters are averaged over `group`; expert parameters are summed over `expert_group` and divided by the
    size N of `group`, since they already hold the sum over their EP group. A parameter without a gradient counts as 0
    and gets a gradient, so that all ranks take the same optimizer step.

    Args:
        parameters: the same ones, in the same order, on every rank. Frozen ones are skipped.
        group: every rank that sees tokens of its own (EP x DP); None for a single rank.
        expert_group: the ranks that hold the same experts; None where each expert lives on one rank.
    """
    if group is None:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    num_ranks = dist.get_world_size(group)
    _sum_and_divide([p for p in trained if not is_expert(p)], group, num_ranks)
    _sum_and_divide([p for p in trained if is_expert(p)], expert_group, num_ranks)


def _sum_and_divide(parameters: list[nn.Parameter], group: dist.ProcessGroup | None, divisor: int) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        assert parameter.grad is not None
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        if group is not None and dist.get_world_size(group) > 1:
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])
        torch._foreach_div_(grads, divisor)


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    ep_group: dist.ProcessGroup | None,
    norm_type: float = 2.0,
) -> Tensor:
    """Clips to a total norm over the replicated parameters, counted once, and the experts of all ranks. Collective.

    Call it after `reduce_gradients`. Every rank takes part, also one whose experts have no gradient, and all get the
    same norm.

    Args:
        parameters: of this rank.
        max_norm: limit of the total norm; gradients are scaled by max_norm / (norm + 1e-6) where it is exceeded.
        ep_group: the ranks whose experts together are all experts; None for a single rank.
        norm_type: p of the p-norm; `float("inf")` for the largest magnitude.

    Returns:
        The total norm before clipping, a float32 scalar (float64 for float64 gradients); inf or NaN where a gradient
        is, on every rank.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    replicated = _power_sum([p.grad for p in with_grad if not is_expert(p) and p.grad is not None], norm_type)
    experts = _power_sum([p.grad for p in with_grad if is_expert(p) and p.grad is not None], norm_type)
    if ep_group is not None and dist.get_world_size(ep_group) > 1:
        op = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
        experts = experts.to(with_grad[0].device if with_grad else experts.device)
        dist.all_reduce(experts, op=op, group=ep_group)
    if norm_type == float("inf"):
        norm = torch.maximum(replicated, experts)
    else:
        norm = (replicated + experts) ** (1.0 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in with_grad:
        assert parameter.grad is not None
        parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm


def _power_sum(grads: list[Tensor], norm_type: float) -> Tensor:
    """sum |g|^p, or max |g| for p = inf; 0 without gradients."""
    if not grads:
        return torch.zeros(())
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms = torch.stack([torch.linalg.vector_norm(grad, norm_type, dtype=wide) for grad in grads])
    return norms.max() if norm_type == float("inf") else (norms**norm_type).sum()
