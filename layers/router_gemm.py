"""The router's GEMM: float32 sums and results whatever the dtype of its operands, forward and backward.

On CUDA the operands are bfloat16 (tensor cores, float32 accumulation and output), elsewhere they are float32. A float64
x asks for float64 throughout. An explicit backward keeps float32 copies of x out of the saved tensors.

Letters: T tokens, H hidden, E experts.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor

from moe_ep.autograd.once import once_differentiable

_MM_HAS_OUT_DTYPE: Final = hasattr(torch.ops.aten.mm, "dtype")  # torch >= 2.8


def router_logits(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """x_TH @ weight_EH.T: [T, E] float32, from bfloat16 operands on CUDA, float32 elsewhere; float64 if x is."""
    return cast(Tensor, _RouterLogits.apply(x_TH, weight_EH))  # type: ignore[no-untyped-call]


class _RouterLogits(torch.autograd.Function):
    """logits_TE = x_TH @ weight_EH.T in float32; dx in x's dtype, dw in the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        ctx.wide = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
        return _mm(x_TH, weight_EH.t(), ctx.wide)

    @staticmethod
    @once_differentiable("TopKRouter")
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TH, weight_EH = ctx.saved_tensors
        if grad_TE.is_cuda and ctx.wide == torch.float32:
            grad_TE = grad_TE.to(torch.bfloat16)  # once for both products
        grad_x = _mm(grad_TE, weight_EH, ctx.wide, x_TH.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = _mm(grad_TE.t(), x_TH, ctx.wide).to(weight_EH.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def _mm(a: Tensor, b: Tensor, wide: torch.dtype, out_dtype: torch.dtype | None = None) -> Tensor:
    """a @ b, summed in `wide`, the dtype of the result unless given; on CUDA float32 sums take bfloat16 operands."""
    out_dtype = wide if out_dtype is None else out_dtype
    with torch.autocast(device_type=a.device.type, enabled=False):  # backward may run inside the caller's autocast
        if wide == torch.float64 or not a.is_cuda:
            return torch.mm(a.to(wide), b.to(wide)).to(out_dtype)
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
        if out_dtype == torch.bfloat16:  # the GEMM rounds its float32 sums itself, which spares a pass over the result
            return torch.mm(a, b)
        if _MM_HAS_OUT_DTYPE:
            return torch.mm(a, b, out_dtype=torch.float32).to(out_dtype)
        return torch.mm(a.float(), b.float()).to(out_dtype)
