"""A plain sum whose gradient travels as FP8. The forward is `moe_ep.combine` without weights."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from moe_ep.autograd.combine import Combine, combine_by, grads_of_combine
from moe_ep.autograd.once import once_differentiable
from moe_ep.buffer import Buffer
from moe_ep.fp8 import dequantize_1x128, quantize_1x128
from moe_ep.handle import DispatchHandle

_ROWS_AT_ONCE: Final = 4096  # float32 copies are made of so many rows at a time


class CombineFp8Grad(Combine):
    """The gradient of y is cast to 1x128 blocks with scales that are powers of two, and dequantised on arrival."""

    @staticmethod
    @once_differentiable("combine")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        data, scales = quantize_1x128(grad_y, power_of_two=True)
        ctx.backend.open_dispatch(ctx.handle, data)
        received, received_scales = ctx.backend.dispatch_scaled(ctx.handle, data, scales)
        grad_RH = torch.empty(received.shape, dtype=grad_y.dtype, device=grad_y.device)
        for begin in range(0, len(received), _ROWS_AT_ONCE):
            part = slice(begin, begin + _ROWS_AT_ONCE)
            grad_RH[part] = dequantize_1x128(received[part], received_scales[part], grad_y.dtype)
        return grads_of_combine(ctx, grad_RH, None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def combine_fp8_grad(buffer: Buffer, rows: Tensor, handle: DispatchHandle, exact: bool = False) -> Tensor:
    """`moe_ep.combine`, but the gradient of y travels as FP8: about half the bytes, and 4 significant bits."""
    return combine_by(CombineFp8Grad, buffer, rows, handle, None, exact)
