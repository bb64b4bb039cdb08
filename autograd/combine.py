"""`moe_ep.combine`: the experts' results travel home and are summed. Its backward is a dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ep.autograd import ops
from moe_ep.autograd.once import once_differentiable
from moe_ep.backends.base import Backend
from moe_ep.buffer import Buffer
from moe_ep.checks import as_weights, check_combine, check_handle
from moe_ep.handle import DispatchHandle, PackedHandle


class Combine(torch.autograd.Function):
    """Brings rows home; keeps them for the weights' gradient, and the weights for the rows'."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor | None,
        anchor: Tensor | None,
        backend: Backend,
        handle: DispatchHandle,
        exact: bool,
    ) -> Tensor:
        ctx.backend, ctx.handle = backend, handle
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        return backend.combine(handle, rows, weights, exact)

    @staticmethod
    @once_differentiable("combine")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        rows, weights = ctx.saved_tensors
        return grads_of_combine(ctx, *ctx.backend.combine_backward(ctx.handle, grad_y, rows, weights))


def grads_of_combine(
    ctx: Any, grad_rows: Tensor, grad_weights: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
    """What a backward returns for the arguments of `Combine.forward`."""
    return (
        grad_rows if ctx.needs_input_grad[0] else None,  # rows
        grad_weights,  # weights
        None,  # anchor: only there to put every rank into the graph
        None,  # backend
        None,  # handle
        None,  # exact
    )


def combine(
    buffer: Buffer,
    rows: Tensor,
    handle: DispatchHandle | PackedHandle,
    topk_weights: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """Brings the rows of a dispatch home and adds up those of each token. Collective, differentiable.

    The sum is taken in float32 (float64 for float64 rows), in a written order: on each rank the rows of a token in slot
    order, each product with its weight rounded before it is added, the sum rounded to the dtype of the rows; then at
    home the ranks in ascending order, rounded once more. A token that was sent nowhere comes back as exactly 0.

    Args:
        buffer: a buffer over the ranks that made the handle.
        rows: [R, H], one for each row that the dispatch gave, in any row dtype.
        handle: `DispatchOutput.handle`.
        topk_weights: [R] float32 (float64 beside float64 rows), expert_major only: each row counts times its weight.
            `dw = <dy, row>` in float32 flows back to them.
        exact: bring every row home unreduced and add all slots of a token in slot order, rounding once, so that the
            result does not depend on the number of ranks. expert_major only; moves up to K rows a token.

    Returns:
        [T, H] in the dtype of the rows, T as in the dispatch.

    Raises:
        TypeError, ValueError: rows, weights or a handle that do not fit. Raised on every rank, naming the rank.
        ConfigError: the ranks combine different dispatches, or disagree on H, dtype or `exact`.
        EPTimeoutError: a rank did not come within the buffer's `timeout_secs`.
    """
    if torch.compiler.is_compiling():
        return ops.compiled_combine(buffer, rows, handle, topk_weights, exact)
    return combine_by(Combine, buffer, rows, handle, topk_weights, exact)


def combine_by(
    function: type[Combine],
    buffer: Buffer,
    rows: Tensor,
    handle: DispatchHandle | PackedHandle,
    topk_weights: Tensor | None,
    exact: bool,
) -> Tensor:
    """`combine`, eager, with the backward of `function`; only `Combine` itself is a single operation where watched."""
    backend = buffer.backend
    try:
        buffer.check()
        handle = handle.unpack() if isinstance(handle, PackedHandle) else handle
        check_handle(handle, backend.ranks, backend.rank, buffer.placement)
        check_combine(handle, rows, topk_weights, exact)
        weights = None if topk_weights is None else as_weights(topk_weights, rows.dtype, "topk_weights")
    except (TypeError, ValueError, RuntimeError) as error:
        backend.refuse("combine", error)
    if function is Combine and ops.has_dispatch_mode():
        return ops.compiled_combine(buffer, rows, handle, topk_weights, exact)
    wants_grad = torch.is_grad_enabled() and (rows.requires_grad or (weights is not None and weights.requires_grad))
    joins_backward = backend.open_combine(handle, rows, weights, exact, wants_grad)
    y: Tensor = function.apply(rows, weights, buffer.anchor if joins_backward else None, backend, handle, exact)  # type: ignore[no-untyped-call]
    return y
