"""The router's GEMM: float32 sums and results whatever the dtype of its operands, forward and backward.

A 16-bit x on CUDA goes in with bfloat16 operands (tensor cores, float32 accumulation and output); everywhere else they
are float32, and a float64 x asks for float64 throughout. An explicit backward keeps float32 copies of x out of what is
saved.

Letters: T tokens, H hidden, E experts.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor

from moe_ep.autograd.once import once_differentiable

_MM_HAS_OUT_DTYPE: Final = hasattr(torch.ops.aten.mm, "dtype")  # torch >= 2.8


def router_logits(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """x_TH @ weight_EH.T: [T, E] float32, on CUDA from bfloat16 operands if x is 16-bit; float64 if x is."""
    return cast(Tensor, _RouterLogits.apply(x_TH, weight_EH))  # type: ignore[no-untyped-call]


class _RouterLogits(torch.autograd.Function):
    """logits_TE = x_TH @ weight_EH.T in float32; dx in x's dtype, dw in the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        wide = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
        ctx.operands = torch.bfloat16 if x_TH.is_cuda and x_TH.element_size() == 2 else wide
        ctx.wide = wide
        return _mm(x_TH, weight_EH.t(), ctx.operands, wide)

    @staticmethod
    @once_differentiable("TopKRouter")
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TH, weight_EH = ctx.saved_tensors
        grad_TE = grad_TE.to(ctx.operands)  # once for both products
        grad_x = _mm(grad_TE, weight_EH, ctx.operands, x_TH.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = _mm(grad_TE.t(), x_TH, ctx.operands, ctx.wide) if ctx.needs_input_grad[1] else None
        return grad_x, None if grad_weight is None else grad_weight.to(weight_EH.dtype)


def _mm(a: Tensor, b: Tensor, operands: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    """a @ b from `operands` of that dtype; bfloat16 ones are summed in float32."""
    with torch.autocast(device_type=a.device.type, enabled=False):  # backward may run inside the caller's autocast
        a, b = a.to(operands), b.to(operands)
        if operands != torch.bfloat16:
            product = torch.mm(a, b)
        elif out_dtype == torch.bfloat16:  # the GEMM rounds its float32 sums itself: no pass over the result
            product = torch.mm(a, b)
        elif _MM_HAS_OUT_DTYPE:
            product = torch.mm(a, b, out_dtype=torch.float32)
        else:
            product = torch.mm(a.float(), b.float())
    # Not .to() where it does nothing: in PyTorch 2.11 a compiled Function that returns an alias of what it made gets no
    # gradient (pytorch issue 180642).
    return product if product.dtype == out_dtype else product.to(out_dtype)
