"""A combine whose gradient travels as FP8. The forward is `moe_ep.combine`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ep.autograd.combine import Combine, combine_by, grads_of_combine
from moe_ep.autograd.once import once_differentiable
from moe_ep.buffer import Buffer
from moe_ep.fp8 import dequantize_1x128, quantize_1x128
from moe_ep.handle import DispatchHandle


class CombineFp8Grad(Combine):
    """The gradient of y is cast to 1x128 blocks with scales that are powers of two, and dequantised on arrival."""

    @staticmethod
    @once_differentiable("combine")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        rows, weights = ctx.saved_tensors
        data, scales = quantize_1x128(grad_y, power_of_two=True)
        ctx.backend.open_dispatch(ctx.handle, data)
        received, received_scales = ctx.backend.dispatch_scaled(ctx.handle, data, scales)
        grad_RH = dequantize_1x128(received, received_scales, torch.float32)
        grad_weights = None
        if rows is not None:
            grad_weights = (grad_RH * rows.float()).sum(dim=1)
        if weights is not None:
            grad_RH = grad_RH * weights.unsqueeze(1)
        return grads_of_combine(ctx, grad_RH.to(grad_y.dtype), grad_weights)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def combine_fp8_grad(
    buffer: Buffer, rows: Tensor, handle: DispatchHandle, topk_weights: Tensor | None = None, exact: bool = False
) -> Tensor:
    """`moe_ep.combine`, but the gradient of y travels as FP8: about half the bytes, and 4 significant bits."""
    return combine_by(CombineFp8Grad, buffer, rows, handle, topk_weights, exact)
