"""SwiGLU times a weight of each row, and its gradients, in one CUDA kernel each (csrc/layer/swiglu.h).

The routing weights of the rows go in here rather than into the sum that brings the rows home: the second projection is
linear, so w * down(inner) = down(w * inner), and that sum and its gradient are then plain sums and copies.

Letters: L local experts, R rows, F ffn width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep._native.arguments import dtype_name
from moe_ep.autograd import ops
from moe_ep.autograd.once import once_differentiable
from moe_ep.layers import kernels
from moe_ep.layers.swiglu import address_of_last


def weighted_swiglu(projected_R2F: Tensor, row_weights_R: Tensor, expert_offsets: Tensor | None = None) -> Tensor:
    """weight * silu(gate) * up, differentiable, for tensors that `moe_ep.layers.swiglu.serves`.

    Args:
        projected_R2F: [R, 2F] bfloat16, float16 or float32 on CUDA: gate, then up.
        row_weights_R: [R] float32 on the same device.
        expert_offsets: None, or [L + 1] int32 on the device: rows behind the last offset are not read.

    Returns:
        [R, F], dtype of projected; zero behind the last offset.
    """
    if ops.is_watched():
        out: Tensor = weighted_swiglu_op(projected_R2F, row_weights_R, expert_offsets)
    else:
        out = _WeightedSwiglu.apply(projected_R2F, row_weights_R, expert_offsets)  # type: ignore[no-untyped-call]
    return out


def gradient(projected_R2F: Tensor, row_weights_R: Tensor, grad_out_RF: Tensor) -> tuple[Tensor, Tensor]:
    """[R, 2F] and [R] float32: the gradients of `projected` and of the weights, for who keeps no graph."""
    return _launch_backward(projected_R2F.detach(), row_weights_R.detach(), grad_out_RF.detach(), None)


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, row_weights: Tensor, expert_offsets: Tensor | None) -> Tensor:
        ctx.save_for_backward(projected, row_weights, expert_offsets)
        return _launch(projected, row_weights, expert_offsets)

    @staticmethod
    @once_differentiable("MoELayer")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        projected, row_weights, expert_offsets = ctx.saved_tensors
        return *_launch_backward(projected, row_weights, grad_out, expert_offsets), None  # the offsets are integers


@torch.library.custom_op("moe_ep::weighted_swiglu", mutates_args=(), device_types="cuda")
def weighted_swiglu_op(projected: Tensor, row_weights: Tensor, expert_offsets: Tensor | None) -> Tensor:
    """[R, F]."""
    return _launch(projected, row_weights, expert_offsets)


@weighted_swiglu_op.register_fake
def _fake(projected: Tensor, row_weights: Tensor, expert_offsets: Tensor | None) -> Tensor:
    return projected.new_empty((projected.shape[0], projected.shape[1] // 2))


@torch.library.custom_op("moe_ep::weighted_swiglu_backward", mutates_args=(), device_types="cuda")
def weighted_swiglu_backward_op(
    projected: Tensor, row_weights: Tensor, grad_out: Tensor, expert_offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[R, 2F] and [R]."""
    return _launch_backward(projected, row_weights, grad_out, expert_offsets)


@weighted_swiglu_backward_op.register_fake
def _backward_fake(
    projected: Tensor, row_weights: Tensor, grad_out: Tensor, expert_offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    return projected.new_empty(projected.shape), row_weights.new_empty(row_weights.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
    projected, row_weights, expert_offsets = ctx.saved_tensors
    return *weighted_swiglu_backward_op(projected, row_weights, grad_out, expert_offsets), None


weighted_swiglu_op.register_autograd(_backward, setup_context=_setup)


def _launch(projected: Tensor, row_weights: Tensor, expert_offsets: Tensor | None) -> Tensor:
    projected, row_weights = projected.contiguous(), row_weights.contiguous()
    num_rows, ffn = projected.shape[0], projected.shape[1] // 2
    out = projected.new_empty((num_rows, ffn))
    device, stream = kernels.launch_on(projected)
    with device:
        _native.require().weighted_swiglu(
            projected=projected.data_ptr(),
            row_weights=row_weights.data_ptr(),
            dtype=dtype_name(projected.dtype),
            out=out.data_ptr(),
            num_rows_device=address_of_last(expert_offsets),
            num_rows=num_rows,
            ffn=ffn,
            num_sms=kernels.ALL_SMS,
            stream=stream,
        )
    return out


def _launch_backward(
    projected: Tensor, row_weights: Tensor, grad_out: Tensor, expert_offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    projected, row_weights, grad_out = projected.contiguous(), row_weights.contiguous(), grad_out.contiguous()
    grad_projected, grad_weights = torch.empty_like(projected), torch.empty_like(row_weights)
    device, stream = kernels.launch_on(projected)
    with device:
        _native.require().weighted_swiglu_backward(
            projected=projected.data_ptr(),
            row_weights=row_weights.data_ptr(),
            grad_out=grad_out.data_ptr(),
            dtype=dtype_name(projected.dtype),
            grad_projected=grad_projected.data_ptr(),
            grad_weights=grad_weights.data_ptr(),
            num_rows_device=address_of_last(expert_offsets),
            num_rows=grad_out.shape[0],
            ffn=grad_out.shape[1],
            num_sms=kernels.ALL_SMS,
            stream=stream,
        )
    return grad_projected, grad_weights
