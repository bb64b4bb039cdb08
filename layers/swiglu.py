"""SwiGLU in one CUDA kernel, and its gradient in another (csrc/layer/swiglu.h): silu(gate) * up, arXiv:2002.05202.

The plain formula is in `moe_ep.layers.activations`, which decides where these two take its place. Arithmetic is in
float32 with one rounding at the end, where the plain formula rounds silu(gate) too.

Letters: L local experts, R rows, F ffn width.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep._native.arguments import dtype_name
from moe_ep.autograd import ops
from moe_ep.autograd.once import once_differentiable
from moe_ep.layers import kernels

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def serves(projected: Tensor) -> bool:
    """Whether the kernels take this tensor."""
    return kernels.serve(projected, *_DTYPES)


def swiglu(projected_R2F: Tensor, expert_offsets: Tensor | None = None) -> Tensor:
    """silu(gate) * up, differentiable.

    Args:
        projected_R2F: [R, 2F] (or more leading dimensions) bfloat16, float16 or float32 on CUDA: gate, then up.
        expert_offsets: None, or [L + 1] int32 on the device: rows behind the last offset are not read.

    Returns:
        [R, F], same dtype; zero behind the last offset.
    """
    if ops.is_watched():
        out: Tensor = swiglu_op(projected_R2F, expert_offsets)
    else:
        out = _Swiglu.apply(projected_R2F, expert_offsets)  # type: ignore[no-untyped-call]
    return out


def gradient(projected_R2F: Tensor, grad_out_RF: Tensor) -> Tensor:
    """[R, 2F]: the gradient of `projected`, for who keeps no graph."""
    return _launch_backward(projected_R2F.detach(), grad_out_RF.detach(), None)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, expert_offsets: Tensor | None) -> Tensor:
        ctx.save_for_backward(projected, expert_offsets)
        return _launch(projected, expert_offsets)

    @staticmethod
    @once_differentiable("MoELayer")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        projected, expert_offsets = ctx.saved_tensors
        return _launch_backward(projected, grad_out, expert_offsets), None  # the offsets are integers


@torch.library.custom_op("moe_ep::swiglu", mutates_args=(), device_types="cuda")
def swiglu_op(projected: Tensor, expert_offsets: Tensor | None) -> Tensor:
    """[..., F]."""
    return _launch(projected, expert_offsets)


@swiglu_op.register_fake
def _swiglu_fake(projected: Tensor, expert_offsets: Tensor | None) -> Tensor:
    return projected.new_empty((*projected.shape[:-1], projected.shape[-1] // 2))


@torch.library.custom_op("moe_ep::swiglu_backward", mutates_args=(), device_types="cuda")
def swiglu_backward_op(projected: Tensor, grad_out: Tensor, expert_offsets: Tensor | None) -> Tensor:
    """[..., 2F]."""
    return _launch_backward(projected, grad_out, expert_offsets)


@swiglu_backward_op.register_fake
def _swiglu_backward_fake(projected: Tensor, grad_out: Tensor, expert_offsets: Tensor | None) -> Tensor:
    return projected.new_empty(projected.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
    projected, expert_offsets = ctx.saved_tensors
    return swiglu_backward_op(projected, grad_out, expert_offsets), None


swiglu_op.register_autograd(_backward, setup_context=_setup)


def zero_tail(rows_RN: Tensor, expert_offsets: Tensor) -> None:
    """Set the rows behind the last offset to zero, in place, without a host wait.

    Args:
        rows_RN: [R, N] contiguous, any dtype, on CUDA.
        expert_offsets: [L + 1] int32 on the device.
    """
    if not (rows_RN.is_cuda and kernels.are_installed()):
        rows_RN.masked_fill_(torch.arange(rows_RN.shape[0], device=rows_RN.device)[:, None] >= expert_offsets[-1], 0)
        return
    device, stream = kernels.launch_on(rows_RN)
    with device:
        _native.require().zero_tail(
            rows=rows_RN.data_ptr(),
            num_rows_device=address_of_last(expert_offsets),
            num_rows=rows_RN.shape[0],
            row_bytes=rows_RN.shape[1] * rows_RN.element_size(),
            num_sms=kernels.ALL_SMS,
            stream=stream,
        )


def address_of_last(expert_offsets: Tensor | None) -> int:
    """Where the number of rows that count is stored on the device; 0 where all do."""
    if expert_offsets is None:
        return 0
    return expert_offsets.data_ptr() + (expert_offsets.numel() - 1) * expert_offsets.stride(0) * 4


def _launch(projected: Tensor, expert_offsets: Tensor | None) -> Tensor:
    projected = projected.contiguous()
    ffn = projected.shape[-1] // 2
    out = projected.new_empty((*projected.shape[:-1], ffn))
    device, stream = kernels.launch_on(projected)
    with device:
        _native.require().swiglu(
            projected=projected.data_ptr(),
            dtype=dtype_name(projected.dtype),
            out=out.data_ptr(),
            num_rows_device=address_of_last(expert_offsets),
            num_rows=out.numel() // ffn,
            ffn=ffn,
            num_sms=kernels.ALL_SMS,
            stream=stream,
        )
    return out


def _launch_backward(projected: Tensor, grad_out: Tensor, expert_offsets: Tensor | None) -> Tensor:
    projected, grad_out = projected.contiguous(), grad_out.contiguous()
    grad_projected = torch.empty_like(projected)
    ffn = grad_out.shape[-1]
    device, stream = kernels.launch_on(projected)
    with device:
        _native.require().swiglu_backward(
            projected=projected.data_ptr(),
            grad_out=grad_out.data_ptr(),
            dtype=dtype_name(projected.dtype),
            grad_projected=grad_projected.data_ptr(),
            num_rows_device=address_of_last(expert_offsets),
            num_rows=grad_out.numel() // ffn,
            ffn=ffn,
            num_sms=kernels.ALL_SMS,
            stream=stream,
        )
    return grad_projected
