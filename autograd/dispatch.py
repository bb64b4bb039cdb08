"""`moe_ep.dispatch`: tokens travel to the ranks of their experts. Its backward is a combine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ep.autograd import ops
from moe_ep.autograd.dispatch_backward import Arrival, backward_of_dispatch, tie
from moe_ep.autograd.dispatch_fp8 import dispatch_fp8
from moe_ep.autograd.once import once_differentiable
from moe_ep.buffer import Buffer
from moe_ep.checks import dispatch_request
from moe_ep.handle import DispatchOutput
from moe_ep.integrations import transformer_engine


class Dispatch(Arrival):
    """Rows in the dtype of x."""

    @staticmethod
    @once_differentiable("dispatch")
    def backward(
        ctx: Any, grad_rows: Tensor, grad_row_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        return backward_of_dispatch(ctx, grad_rows, grad_row_weights)


def dispatch(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    *,
    num_experts: int,
    layout: str = "expert_major",
    alignment: int = 1,
    max_rows: int | None = None,
) -> DispatchOutput:
    """Sends every token to the ranks of its experts. Collective over the buffer's group, differentiable.

    Letters: T tokens of this rank (any number, also 0, also different on every rank), H hidden, K slots a token
    (1..64), E experts, L of them on this rank, R rows received.

    Args:
        buffer: the exchange; every rank calls the same operations on it in the same order.
        x: [T, H] float64, float32, bfloat16 or float16, any strides. Gradients flow back to it: each token's is the
            sum over the rows that were made from it, added in float32 (float64 for float64) in the written order.
            A `Float8BlockwiseQTensor` of Transformer Engine travels as FP8 (expert_major, without max_rows) and comes
            out dequantised; `moe_ep.dispatch_fp8` hands out the FP8 rows themselves.
        topk_idx: [T, K] int64 or int32, global expert ids, -1 for an unused slot. A token whose slots are all -1 is
            sent nowhere. Two slots may name the same expert.
        topk_weights: [T, K] float32 (float64 beside float64 rows; float16 and bfloat16 are cast), or None. They travel
            and come out beside the rows; they are not multiplied in here. Gradients flow back to them.
        num_experts: E, the same on every rank.
        layout: "expert_major": one row per (token, slot), grouped by local expert; "compact": one row per (token,
            rank).
        alignment: rows of each expert are padded with zeros to a multiple of this (expert_major); in compact only the
            reported counts are rounded up.
        max_rows: a fixed number of rows to hand out, without a host wait; the rest is padding and the two lists of the
            result are None. A call that receives more gives NaN rows, and `buffer.check()` or the next call raises.

    Returns:
        DispatchOutput: rows, their local ids and weights, counts, and the handle for `moe_ep.combine`.

    Raises:
        TypeError, ValueError: a dtype, shape or id that cannot be served. Raised on every rank, naming the rank.
        ConfigError: two ranks disagree on H, K, E, dtype, layout, alignment, placement, the order of operations, or
            whether gradients are enabled: a rank under `torch.no_grad` would be missing in the others' backward.
        EPTimeoutError: a rank did not come within the buffer's `timeout_secs`.
    """
    if torch.compiler.is_compiling():
        return ops.compiled_dispatch(buffer, x, topk_idx, topk_weights, num_experts, layout, alignment, max_rows)
    if transformer_engine.is_quantized(x):
        return _dispatch_quantized(buffer, x, topk_idx, topk_weights, num_experts, layout, alignment, max_rows)
    backend = buffer.backend
    if max_rows is None:
        backend.settle()
    try:
        buffer.check()
        placement = buffer.placement(num_experts)
        request = dispatch_request(
            x, topk_idx, topk_weights, placement, layout, alignment, max_rows, buffer.num_channels
        )
        weights = topk_weights
        if topk_weights is not None and request.topk_weights is not None:  # with its graph, unlike that of the request
            weights = topk_weights.to(request.topk_weights.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        backend.refuse("dispatch", error)
    if ops.has_dispatch_mode():
        return ops.compiled_dispatch(buffer, x, topk_idx, weights, num_experts, layout, alignment, max_rows)
    plan, moved, _ = backend.plan_and_dispatch(request, None)
    rows, row_weights = tie(Dispatch, buffer, x, weights, plan, moved)
    return DispatchOutput(
        x=rows,
        topk_idx=plan.row_idx,
        topk_weights=row_weights,
        tokens_per_expert=plan.tokens_per_expert,
        real_tokens_per_expert=plan.real_tokens_per_expert,
        expert_counts=plan.expert_counts,
        expert_offsets=plan.expert_offsets,
        handle=plan.handle,
    )


def _dispatch_quantized(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    layout: str,
    alignment: int,
    max_rows: int | None,
) -> DispatchOutput:
    if layout != "expert_major" or max_rows is not None:
        given = f"layout {layout!r}" if max_rows is None else f"max_rows = {max_rows}"
        error = ValueError(
            f"x is a {type(x).__name__} and the call has {given}; FP8 rows are handed out by expert and counted on the "
            "host: give layout='expert_major' without max_rows, or x.dequantize()."
        )
        buffer.backend.refuse("dispatch", error)
    out = dispatch_fp8(buffer, x, topk_idx, topk_weights, num_experts=num_experts, alignment=alignment)
    return DispatchOutput(
        x=out.rows.dequantize(),
        topk_idx=out.topk_idx,
        topk_weights=out.topk_weights,
        tokens_per_expert=out.tokens_per_expert,
        real_tokens_per_expert=out.real_tokens_per_expert,
        expert_counts=out.expert_counts,
        expert_offsets=out.expert_offsets,
        handle=out.handle,
    )
