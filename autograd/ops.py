"""dispatch and combine as `torch.library` custom ops, for torch.compile and selective checkpointing.

A compiled graph knows tensors and numbers only: the buffer travels as its key, the handle as five tensors, counts as
tensors. Ordinary eager calls do not come here; they call the backend directly. Where a dispatch mode looks at every
operation, as selective checkpointing does, an exchange must be one operation too, so such calls come here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from moe_ep._native import require
from moe_ep.backends.base import Backend
from moe_ep.buffer import BUFFERS, Buffer
from moe_ep.checks import as_weights, check_combine, check_handle, dispatch_request
from moe_ep.handle import NUM_HANDLE_TENSORS, DispatchHandle, DispatchOutput, PackedHandle, num_handle_numbers


def _backend(key: int) -> Backend:
    buffer = BUFFERS.get(key)
    if buffer is None:
        raise RuntimeError(f"the buffer with key {key} is gone; keep it alive as long as graphs that use it.")
    return buffer.backend


# -- dispatch -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("moe_ep::dispatch", mutates_args=())
def dispatch_op(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    anchor: Tensor,
    buffer: int,
    num_experts: int,
    layout: str,
    alignment: int,
    max_rows: int | None,
    x_needs_grad: bool,
    weights_need_grad: bool,
    grad_enabled: bool,
) -> list[Tensor]:
    """rows, row ids, row weights (empty if none), expert counts, expert offsets, and the packed handle."""
    backend = _backend(buffer)
    if max_rows is None:
        backend.settle()
    try:
        BUFFERS[buffer].check()
        placement = BUFFERS[buffer].placement(num_experts)
        request = dispatch_request(
            x, topk_idx, topk_weights, placement, layout, alignment, max_rows, BUFFERS[buffer].num_channels
        )
    except (TypeError, ValueError, RuntimeError) as error:
        backend.refuse("dispatch", error)
    # The caller's: gradients are always off where an operation runs.
    request = replace(
        request, x_needs_grad=x_needs_grad, weights_need_grad=weights_need_grad, grad_enabled=grad_enabled
    )
    plan, rows, _ = backend.plan_and_dispatch(request, None)
    row_weights = x.new_empty(0) if plan.row_weights is None else plan.row_weights
    return [rows, plan.row_idx, row_weights, plan.expert_counts, plan.expert_offsets, *plan.handle.pack()]


@dispatch_op.register_fake
def _dispatch_fake(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    anchor: Tensor,
    buffer: int,
    num_experts: int,
    layout: str,
    alignment: int,
    max_rows: int | None,
    x_needs_grad: bool,
    weights_need_grad: bool,
    grad_enabled: bool,
) -> list[Tensor]:
    owner = BUFFERS[buffer]
    num_local = len(owner.placement(num_experts).experts_of(owner.rank))
    context = torch.library.get_ctx()
    num_rows = context.new_dynamic_size() if max_rows is None else max_rows
    num_sent, num_received = context.new_dynamic_size(), context.new_dynamic_size()
    num_topk = topk_idx.shape[1]
    compact = layout == "compact"
    per_row = (num_rows, num_topk) if compact else (num_rows,)
    row_weights = x.new_empty(0) if topk_weights is None else topk_weights.new_empty(per_row)
    ids = topk_idx.new_empty
    kernels = require() if owner.backend_name == "intranode" else None
    return [
        x.new_empty(num_rows, x.shape[1]),
        ids(per_row),
        row_weights,
        ids(num_local, dtype=torch.int32),
        ids(num_local + 1, dtype=torch.int32),
        torch.empty(num_handle_numbers(owner.group_size), dtype=torch.int64, device="cpu"),
        ids(topk_idx.shape, dtype=torch.int64),
        ids(num_sent, dtype=torch.int64),
        ids(num_received, dtype=torch.int32),
        ids(0 if compact else num_rows, dtype=torch.int64),
        ids(kernels.geometry_length(owner.group_size, num_local) if kernels else 0, dtype=torch.int32),
        ids((topk_idx.shape[0], owner.group_size) if kernels else 0, dtype=torch.int32),
        ids((0 if compact else num_received, num_topk) if kernels else 0, dtype=torch.int32),
    ]


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    topk_weights, ctx.buffer, ctx.weights_need_grad = inputs[2], inputs[4], inputs[10]
    ctx.has_weights = topk_weights is not None
    ctx.save_for_backward(*output[-NUM_HANDLE_TENSORS:])


def _dispatch_grad(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    grad_x, grad_weights = dispatch_backward_op(grads[0], grads[2], list(ctx.saved_tensors), ctx.buffer)
    return grad_x, None, grad_weights if ctx.has_weights else None, *[None] * 9


@torch.library.custom_op("moe_ep::dispatch_backward", mutates_args=())
def dispatch_backward_op(
    grad_rows: Tensor, grad_row_weights: Tensor, handle: Sequence[Tensor], buffer: int
) -> list[Tensor]:
    """dx [T, H] and dw [T, K], zeros where no rank wants them."""
    unpacked = DispatchHandle.unpack(handle)
    grad_x, grad_weights = _backend(buffer).dispatch_backward(unpacked, grad_rows, grad_row_weights)
    if grad_x is None:
        grad_x = grad_rows.new_zeros(unpacked.num_tokens, grad_rows.shape[1])
    if grad_weights is None:
        grad_weights = grad_row_weights.new_zeros(unpacked.slot_rank.shape)
    return [grad_x, grad_weights]


@dispatch_backward_op.register_fake
def _dispatch_backward_fake(
    grad_rows: Tensor, grad_row_weights: Tensor, handle: Sequence[Tensor], buffer: int
) -> list[Tensor]:
    slot_rank = handle[1]
    return [grad_rows.new_empty(slot_rank.shape[0], grad_rows.shape[1]), grad_row_weights.new_empty(slot_rank.shape)]


dispatch_op.register_autograd(_dispatch_grad, setup_context=_dispatch_setup)


# -- combine --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("moe_ep::combine", mutates_args=())
def combine_op(
    rows: Tensor,
    topk_weights: Tensor | None,
    anchor: Tensor,
    handle: Sequence[Tensor],
    buffer: int,
    exact: bool,
    needs_grad: bool,
) -> Tensor:
    """y [T, H]."""
    backend = _backend(buffer)
    unpacked = DispatchHandle.unpack(handle)
    try:
        BUFFERS[buffer].check()
        check_handle(unpacked, backend.ranks, backend.rank, BUFFERS[buffer].placement)
        check_combine(unpacked, rows, topk_weights, exact)
    except (TypeError, ValueError, RuntimeError) as error:
        backend.refuse("combine", error)
    backend.open_combine(unpacked, rows, topk_weights, exact, needs_grad)
    return backend.combine(unpacked, rows, topk_weights, exact)


@combine_op.register_fake
def _combine_fake(
    rows: Tensor,
    topk_weights: Tensor | None,
    anchor: Tensor,
    handle: Sequence[Tensor],
    buffer: int,
    exact: bool,
    needs_grad: bool,
) -> Tensor:
    return rows.new_empty(handle[1].shape[0], rows.shape[1])


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, _, handle, ctx.buffer = inputs[:5]
    ctx.num_rows = rows.shape[0]
    ctx.has_weights = weights is not None
    ctx.save_for_backward(*([rows, weights] if ctx.has_weights else []), *handle)


def _combine_grad(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    handle = saved[-NUM_HANDLE_TENSORS:]
    rows, weights = saved[:2] if ctx.has_weights else (None, None)
    grad_rows, grad_weights = combine_backward_op(grad_y, rows, weights, handle, ctx.buffer, ctx.num_rows)
    return grad_rows, grad_weights if ctx.has_weights else None, None, [None] * NUM_HANDLE_TENSORS, None, None, None


@torch.library.custom_op("moe_ep::combine_backward", mutates_args=())
def combine_backward_op(
    grad_y: Tensor,
    rows: Tensor | None,
    topk_weights: Tensor | None,
    handle: Sequence[Tensor],
    buffer: int,
    num_rows: int,
) -> list[Tensor]:
    """d_rows [R, H] and d_weights [R] (empty without weights)."""
    unpacked = DispatchHandle.unpack(handle)
    grad_rows, grad_weights = _backend(buffer).combine_backward(unpacked, grad_y, rows, topk_weights)
    return [grad_rows, grad_y.new_empty(0) if grad_weights is None else grad_weights]


@combine_backward_op.register_fake
def _combine_backward_fake(
    grad_y: Tensor,
    rows: Tensor | None,
    topk_weights: Tensor | None,
    handle: Sequence[Tensor],
    buffer: int,
    num_rows: int,
) -> list[Tensor]:
    grad_weights = grad_y.new_empty(0) if topk_weights is None else torch.empty_like(topk_weights)
    return [grad_y.new_empty(num_rows, grad_y.shape[1]), grad_weights]


combine_op.register_autograd(_combine_grad, setup_context=_combine_setup)


# -- counts over the group --------------------------------------------------------------------------------------------


@torch.library.custom_op("moe_ep::all_reduce", mutates_args=())
def all_reduce_op(tensor: Tensor, buffer: int) -> Tensor:
    """The sum over the EP group; not differentiable."""
    return _backend(buffer).all_reduce(tensor.clone())


@all_reduce_op.register_fake
def _all_reduce_fake(tensor: Tensor, buffer: int) -> Tensor:
    return torch.empty_like(tensor)


def all_reduce(buffer: Buffer, tensor: Tensor) -> Tensor:
    """The sum of `tensor` over the EP group, one operation where it is watched. Collective."""
    if not is_watched():
        return buffer.all_reduce(tensor)
    total: Tensor = all_reduce_op(tensor, buffer.key)
    return total


# -- the way in, from watched code ------------------------------------------------------------------------------------


def is_watched() -> bool:
    """Whether something looks at single operations: torch.compile, or a dispatch mode around an eager call."""
    return torch.compiler.is_compiling() or has_dispatch_mode()


def has_dispatch_mode() -> bool:
    """`is_watched` for a call that is known to be eager."""
    return _get_current_dispatch_mode() is not None


def compiled_dispatch(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    layout: str,
    alignment: int,
    max_rows: int | None,
) -> DispatchOutput:
    """`moe_ep.dispatch` where it is watched. In torch.compile the lists of the result are None, the handle packed."""
    weights = None if topk_weights is None else as_weights(topk_weights, x.dtype, "topk_weights")
    wants_grad = torch.is_grad_enabled()
    rows, row_idx, row_weights, counts, offsets, *handle = dispatch_op(
        x,
        topk_idx,
        weights,
        buffer.anchor,
        buffer.key,
        num_experts,
        layout,
        alignment,
        max_rows,
        wants_grad and x.requires_grad,
        wants_grad and weights is not None and weights.requires_grad,
        wants_grad,
    )
    has_lists = max_rows is None and not torch.compiler.is_compiling()
    packed = PackedHandle(tuple(handle))
    return DispatchOutput(
        x=rows,
        topk_idx=row_idx,
        topk_weights=None if weights is None else row_weights,
        tokens_per_expert=offsets.diff().tolist() if has_lists else None,
        real_tokens_per_expert=counts.tolist() if has_lists else None,
        expert_counts=counts,
        expert_offsets=offsets,
        handle=packed if torch.compiler.is_compiling() else packed.unpack(),
    )


def compiled_combine(
    buffer: Buffer, rows: Tensor, handle: DispatchHandle | PackedHandle, topk_weights: Tensor | None, exact: bool
) -> Tensor:
    """`moe_ep.combine` where it is watched."""
    weights = None if topk_weights is None else as_weights(topk_weights, rows.dtype, "topk_weights")
    tensors = handle.tensors if isinstance(handle, PackedHandle) else handle.pack()
    needs_grad = torch.is_grad_enabled()
    y: Tensor = combine_op(rows, weights, buffer.anchor, list(tensors), buffer.key, exact, needs_grad)
    return y
