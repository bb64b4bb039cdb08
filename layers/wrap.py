"""Models with `MoELayer` inside PyTorch's wrappers: DistributedDataParallel, FSDP2, selective checkpointing.

The words of a run with N = DP x EP ranks: the *EP group* shares the experts, the *expert-DP group* are the DP ranks
that hold the same experts. Every rank has tokens of its own, so dense parameters belong to all N ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, create_selective_checkpoint_contexts

from moe_ep.autograd import ops
from moe_ep.layers.experts import GroupedExperts
from moe_ep.layers.router import TopKRouter
from moe_ep.layers.routing_kernel import route_op
from moe_ep.parallel import is_expert


def wrap_ddp(module: nn.Module, group: dist.ProcessGroup | None = None, **options: Any) -> DistributedDataParallel:
    """`DistributedDataParallel` that reduces the dense parameters and leaves the experts alone.

    Experts are not broadcast at construction and their gradients are not reduced: call
    `moe_ep.parallel.reduce_gradients(experts, group, expert_group)` after the last backward of a step, with the
    experts of `moe_ep.parallel.split_parameters`. The routers' counters `tokens_per_expert` differ between ranks and
    are not broadcast either. Build the model with the same seed on all ranks, so that ranks with the same experts start
    with the same values.

    Args:
        module: contains `MoELayer`s, whose EP groups are subgroups of `group`.
        group: all N ranks; None for the default group.
        options: of `DistributedDataParallel`.
    """
    ignored = [name for name, parameter in module.named_parameters() if is_expert(parameter)]
    for prefix, child in module.named_modules():
        if isinstance(child, TopKRouter):
            ignored.append(f"{prefix}.tokens_per_expert" if prefix else "tokens_per_expert")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(module, process_group=group, **options)


def wrap_fsdp(
    module: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh, blocks: Iterable[nn.Module] = (), **options: Any
) -> nn.Module:
    """FSDP2 in place: experts sharded over the expert-DP ranks, everything else over all ranks.

    Gradients come out as those of the loss averaged over all N ranks; nothing is left to reduce. FSDP2 averages those
    of the experts over the D expert-DP ranks, and a hook divides by the other N / D. (`set_gradient_divide_factor(N)`
    would do both, but torch 2.13 divides twice by it on a mesh of one rank for float64 and float16.)

    Args:
        module: contains `MoELayer`s.
        mesh: one dimension, all N ranks.
        expert_mesh: one dimension, the D ranks that hold the same experts; of size 1 where each expert lives on one.
        blocks: modules inside `module` to shard one by one, a transformer block each.
        options: of `torch.distributed.fsdp.fully_shard`, for all of them (mp_policy, reshard_after_forward, ...).

    Returns:
        `module`.

    Raises:
        ValueError: the size of `mesh` is no multiple of that of `expert_mesh`.
    """
    num_ranks, num_copies = mesh.size(), expert_mesh.size()
    if num_ranks % num_copies:
        raise ValueError(
            f"mesh has {num_ranks} ranks and expert_mesh {num_copies}; all ranks must be a multiple of the ranks that "
            "hold the same experts. Give mesh the EP x DP ranks and expert_mesh the DP ranks."
        )
    scale = functools.partial(_divide, divisor=num_ranks // num_copies)
    for experts in [child for child in module.modules() if isinstance(child, GroupedExperts)]:
        _shard(experts, expert_mesh, options).set_all_reduce_hook(scale)
        for parameter in experts.parameters(recurse=False):
            parameter.allreduce = False  # type: ignore[attr-defined]  # FSDP2 made new parameters
    for block in [*blocks, module]:
        _shard(block, mesh, options)
    # FSDP2 marks ranges for the profiler, in recompute others than in forward; selective checkpointing, which wants the
    # same operations in both, has to overlook them.
    marks = torch.ops.profiler
    SAC_IGNORED_OPS.update({marks._record_function_enter_new.default, marks._record_function_exit._RecordFunction})
    return module


def _shard(module: nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> FSDPModule:
    sharded: FSDPModule = fully_shard(module, mesh=mesh, **options)
    if mesh.device_type == "cpu" or dist.get_backend(mesh.get_group()) == "gloo":
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return sharded


def _divide(grad: Tensor, divisor: int) -> None:
    grad.div_(divisor)


def keep_exchange(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Policy of selective checkpointing: results of the exchange are kept, all else is computed again in backward.

    Kept are the rows that dispatch received with their routing, the sum that combine returned, and the router's choice;
    so recompute runs the experts without any communication. Call it from a policy of your own to keep more.
    """
    own = (ops.dispatch_op, ops.combine_op, ops.all_reduce_op, route_op)
    kept = operation is torch.ops.aten.topk.default or operation in [op._opoverload for op in own]
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_exchange_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`checkpoint(block, x, use_reentrant=False, context_fn=keep_exchange_contexts)` with the policy above."""
    forward, recompute = create_selective_checkpoint_contexts(keep_exchange)  # type: ignore[no-untyped-call]
    return forward, recompute
