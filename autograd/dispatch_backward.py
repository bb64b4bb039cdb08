"""The backward that every dispatch has, whatever its rows travelled as."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def backward_of_dispatch(
    ctx: Any, grad_rows: Tensor, grad_row_weights: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    """Gradients of (x, weights, anchor, backend, plan), for a context that has `backend` and `handle`."""
    grad_x, grad_weights = ctx.backend.dispatch_backward(ctx.handle, grad_rows, grad_row_weights)
    return (
        grad_x if ctx.needs_input_grad[0] else None,  # x
        grad_weights if ctx.needs_input_grad[1] else None,  # weights
        None,  # anchor: only there to put every rank into the graph
        None,  # backend
        None,  # plan
    )
