"""Gradients when experts are shared between ranks: what to average over whom, and the norm over all of it.

A parameter with `allreduce = False` (the convention of Megatron-Core; `GroupedExperts` sets it) is an expert's: its
gradient already is the sum over the tokens of all ranks of the EP group. Every other parameter is replicated and its
gradient holds this rank's tokens only. `moe_ep.layers.wrap` puts a model into DistributedDataParallel or FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether the parameter belongs to the experts of this rank (`allreduce = False`)."""
    return getattr(parameter, "allreduce", True) is False


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of a module in two lists, in order: those that all ranks hold, and the experts of this rank.

    Give an optimizer the two as separate groups where FSDP2 shards them over different meshes.
    """
    parameters = list(module.parameters())
    return [p for p in parameters if not is_expert(p)], [p for p in parameters if is_expert(p)]


def reduce_gradients(
    parameters: Iterable[nn.Parameter],
    group: dist.ProcessGroup | None,
    expert_group: dist.ProcessGroup | None = None,
) -> None:
    """Turns per-rank gradients into those of the loss averaged over the ranks of `group`, in place. Collective.

    Replicated parameters are averaged over `group`; expert parameters are summed over `expert_group` and divided by the
    size N of `group`, since they already hold the sum over their EP group. A parameter without a gradient counts as 0
    and gets a gradient, so that all ranks take the same optimizer step.

    Call it once a step, after the last backward. With DistributedDataParallel give it the expert parameters only, the
    others are reduced already; with FSDP2 do not call it at all.

    Args:
        parameters: the same ones, in the same order, on every rank. Frozen ones are skipped.
        group: every rank that sees tokens of its own (EP x DP); None for a single rank.
        expert_group: the ranks that hold the same experts; None where each expert lives on one rank.

    Raises:
        ValueError: a parameter is sharded by FSDP2, which reduces gradients itself.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    sharded = [parameter for parameter in trained if isinstance(parameter, DTensor)]
    if sharded:
        raise ValueError(
            f"{len(sharded)} of {len(trained)} parameters are DTensors, whose gradients FSDP2 has reduced in backward; "
            "leave out reduce_gradients there."
        )
    if group is None:
        return
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

    Call it when the gradients are reduced (`reduce_gradients`, DistributedDataParallel, FSDP2). Every rank takes part,
    also one whose experts have no gradient, and all get the same norm. Of a DTensor the local shards of its mesh are
    added up.

    Args:
        parameters: of this rank, in the same order on every rank.
        max_norm: limit of the total norm; gradients are scaled by max_norm / (norm + 1e-6) where it is exceeded.
        ep_group: the ranks whose experts together are all experts; None for a single rank.
        norm_type: p of the p-norm; `float("inf")` for the largest magnitude.

    Returns:
        The total norm before clipping, a float32 scalar (float64 for float64 parameters); inf or NaN where a gradient
        is, on every rank.
    """
    parameters = list(parameters)
    replicated = _power_sum([p for p in parameters if not is_expert(p)], parameters, norm_type)
    experts = _power_sum([p for p in parameters if is_expert(p)], parameters, norm_type)
    _reduce(experts, norm_type, [ep_group])
    if norm_type == float("inf"):
        norm = torch.maximum(replicated, experts)
    else:
        norm = (replicated + experts) ** (1.0 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = _local(parameter.grad)
            grad.mul_(scale.to(grad.dtype))
    return norm


def _power_sum(parameters: list[nn.Parameter], everything: list[nn.Parameter], norm_type: float) -> Tensor:
    """sum |g|^p, or max |g| for p = inf, over the ranks that share the parameters' shards; 0 without gradients.

    Dtype and device follow `everything`, so that they are the same on a rank that has no gradient here.
    """
    wide = torch.float64 if any(p.dtype == torch.float64 for p in everything) else torch.float32
    total = torch.zeros((), dtype=wide, device=_local(everything[0]).device if everything else None)
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        norms = by_groups.setdefault(_shard_groups(parameter), [])
        if parameter.grad is not None and _local(parameter.grad).numel():
            norms.append(torch.linalg.vector_norm(_local(parameter.grad), norm_type, dtype=wide))
    for groups, norms in by_groups.items():
        part = torch.zeros_like(total)
        if norms:
            stacked = torch.stack(norms)
            part = stacked.max() if norm_type == float("inf") else (stacked**norm_type).sum()
        _reduce(part, norm_type, groups)
        total = torch.maximum(total, part) if norm_type == float("inf") else total + part
    return total


def _reduce(part: Tensor, norm_type: float, groups: Iterable[dist.ProcessGroup | None]) -> None:
    op = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
    for group in groups:
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(part, op=op, group=group)


def _shard_groups(parameter: nn.Parameter) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which a DTensor is sharded; none for an ordinary tensor."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(mesh.get_group(dim) for dim, place in enumerate(parameter.placements) if place.is_shard())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
