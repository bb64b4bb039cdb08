"""What every dispatch is to autograd, whatever its rows travelled as."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ep.backends.base import DispatchPlan
from moe_ep.buffer import Buffer


class Arrived(NamedTuple):
    """A plan and what came along it: no input to autograd, which would hand a view of the rows on."""

    plan: DispatchPlan
    rows: Tensor


class Arrival(torch.autograd.Function):
    """Ties rows that have arrived, and the weights that travelled with their plan, to what was sent.

    A kind of dispatch inherits it, with a `backward` under its own name around `backward_of_dispatch`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor | None, anchor: Tensor | None, buffer: Buffer, arrived: Arrived
    ) -> tuple[Tensor, Tensor | None]:
        plan, rows = arrived
        ctx.backend, ctx.handle = buffer.backend, plan.handle
        # What recompute without re-entry brings back: so it repeats the dispatch on every rank, also on one without
        # experts, whose part of the graph keeps nothing else behind the dispatch.
        ctx.save_for_backward(rows.new_empty(0))
        # No gradient comes for what no rank wants one of.
        frozen = [] if plan.handle.x_needs_grad else [rows]
        if plan.row_weights is not None and not plan.handle.weights_need_grad:
            frozen.append(plan.row_weights)
        ctx.mark_non_differentiable(*frozen)
        return rows, plan.row_weights


def tie(
    kind: type[Arrival], buffer: Buffer, x: Tensor, weights: Tensor | None, plan: DispatchPlan, rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(rows, row weights) with the graph to x and weights; the anchor puts every rank into it where one is there."""
    joins_backward = plan.handle.x_needs_grad or plan.handle.weights_need_grad
    anchor = buffer.anchor if joins_backward else None
    tied: tuple[Tensor, Tensor | None] = kind.apply(x, weights, anchor, buffer, Arrived(plan, rows))  # type: ignore[no-untyped-call]
    return tied


def backward_of_dispatch(
    ctx: Any, grad_rows: Tensor, grad_row_weights: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    """Gradients of the inputs of `Arrival`."""
    assert len(ctx.saved_tensors) == 1  # looked at before the exchange: a recompute begins here at the latest
    grad_x, grad_weights = ctx.backend.dispatch_backward(ctx.handle, grad_rows, grad_row_weights)
    return (
        grad_x if ctx.needs_input_grad[0] else None,  # x
        grad_weights if ctx.needs_input_grad[1] else None,  # weights
        None,  # anchor: only there to put every rank into the graph
        None,  # buffer
        None,  # arrived
    )
