"""What every dispatch is to autograd, whatever its rows travelled as."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ep.backends.base import Backend, DispatchPlan


def tie_to_plan(ctx: Any, backend: Backend, plan: DispatchPlan, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """(rows, weights) as a forward returns them; no gradient comes for what no rank wants one of."""
    ctx.backend, ctx.handle = backend, plan.handle
    frozen = [] if plan.handle.x_needs_grad else [rows]
    if plan.row_weights is not None and not plan.handle.weights_need_grad:
        frozen.append(plan.row_weights)
    ctx.mark_non_differentiable(*frozen)
    return rows, plan.row_weights


def backward_of_dispatch(
    ctx: Any, grad_rows: Tensor, grad_row_weights: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    """Gradients of (x, weights, anchor, backend, plan), for a context of `tie_to_plan`."""
    grad_x, grad_weights = ctx.backend.dispatch_backward(ctx.handle, grad_rows, grad_row_weights)
    return (
        grad_x if ctx.needs_input_grad[0] else None,  # x
        grad_weights if ctx.needs_input_grad[1] else None,  # weights
        None,  # anchor: only there to put every rank into the graph
        None,  # backend
        None,  # plan
    )
