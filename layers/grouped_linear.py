"""One linear map per expert over rows sorted by expert, with the row ranges on the device.

In bfloat16 on a GPU of compute capability 9.0 or newer the map is one grouped GEMM of PyTorch, and so is each of its
two gradients; the host waits for nothing. Elsewhere a loop over the experts reads the ranges on the host, with the bits
of `torch.nn.functional.linear` per expert.

Letters: L local experts, R rows, I and O inputs and outputs of the map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ep.autograd import ops
from moe_ep.autograd.once import once_differentiable
from moe_ep.layers.swiglu import zero_tail

_GEMM_BYTES: Final = 16  # what the grouped GEMM asks of addresses and rows
_MAX_GROUPS: Final = 1023
_PUBLIC_GEMM: Final = getattr(F, "grouped_mm", None)  # torch >= 2.10
_GEMM: Final = cast(Callable[..., Tensor] | None, _PUBLIC_GEMM or getattr(torch, "_grouped_mm", None))  # torch >= 2.8


def one_gemm_serves(device: torch.device, dtype: torch.dtype, weight_shape: Sequence[int]) -> bool:
    """Whether one grouped GEMM does the map [L, O, I] in this dtype: PyTorch has it for the device, and sizes fit."""
    num_experts, num_outputs, num_inputs = weight_shape
    if dtype != torch.bfloat16 or device.type != "cuda" or _GEMM is None:
        return False
    elems = _GEMM_BYTES // dtype.itemsize
    if num_inputs % elems or num_outputs % elems or not 0 < num_experts <= _MAX_GROUPS:
        return False
    # Below 9.0 PyTorch loops over the experts, and its first version knew 9.0 only.
    major = torch.cuda.get_device_capability(device)[0]
    return major == 9 or (major == 10 and _PUBLIC_GEMM is not None)


def linear_per_expert(rows_RI: Tensor, weight_LOI: Tensor, expert_offsets: Tensor, has_tail: bool = True) -> Tensor:
    """rows of expert l @ weight[l].T, differentiable once.

    Args:
        rows_RI: [R, I]; R may be 0.
        weight_LOI: [L, O, I], the dtype of the rows.
        expert_offsets: [L + 1] int32 on the device, where each expert's rows begin, and their end.
        has_tail: there may be rows behind the last offset; they are not read. False spares the look.

    Returns:
        [R, O], zero behind the last offset.
    """
    if ops.is_watched():
        out: Tensor = grouped_linear(rows_RI, weight_LOI, expert_offsets)
    else:
        out = _LinearPerExpert.apply(rows_RI, weight_LOI, expert_offsets, has_tail)  # type: ignore[no-untyped-call]
    return out


class _LinearPerExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weight_LOI: Tensor, expert_offsets: Tensor, has_tail: bool) -> Tensor:
        ctx.has_tail = has_tail
        ctx.save_for_backward(rows_RI, weight_LOI, expert_offsets)
        return _map(rows_RI, weight_LOI, expert_offsets, has_tail)

    @staticmethod
    @once_differentiable("MoELayer")
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_RI, weight_LOI, expert_offsets = ctx.saved_tensors
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        grad_rows_RI = _map_rows_back(grad_RO, weight_LOI, expert_offsets, ctx.has_tail) if wants_rows else None
        grad_weight_LOI = weight_grad(grad_RO, rows_RI, weight_LOI.shape, expert_offsets) if wants_weight else None
        return grad_rows_RI, grad_weight_LOI, None, None  # no gradient: the offsets, the setting


@torch.library.custom_op("moe_ep::grouped_linear", mutates_args=())
def grouped_linear(rows_RI: Tensor, weight_LOI: Tensor, expert_offsets: Tensor) -> Tensor:
    """rows of expert l @ weight[l].T: [R, O].

    Args:
        rows_RI: [R, I]; rows behind the last offset are not read.
        weight_LOI: [L, O, I], the dtype of the rows.
        expert_offsets: [L + 1] int32, where each expert's rows begin, and their end.

    Returns:
        [R, O], zero behind the last offset.
    """
    return _map(rows_RI, weight_LOI, expert_offsets, has_tail=True)


@grouped_linear.register_fake
def _grouped_linear_fake(rows_RI: Tensor, weight_LOI: Tensor, expert_offsets: Tensor) -> Tensor:
    return rows_RI.new_empty(rows_RI.shape[0], weight_LOI.shape[1])


@torch.library.custom_op("moe_ep::grouped_linear_backward", mutates_args=())
def grouped_linear_backward(
    grad_RO: Tensor, rows_RI: Tensor, weight_LOI: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows [R, I] and of the weights [L, O, I]; zero where an expert has no rows."""
    grad_rows_RI = _map_rows_back(grad_RO, weight_LOI, expert_offsets, has_tail=True)
    return grad_rows_RI, weight_grad(grad_RO, rows_RI, weight_LOI.shape, expert_offsets)


@grouped_linear_backward.register_fake
def _grouped_linear_backward_fake(
    grad_RO: Tensor, rows_RI: Tensor, weight_LOI: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    return rows_RI.new_empty(rows_RI.shape), weight_LOI.new_empty(weight_LOI.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_rows_RI, grad_weight_LOI = grouped_linear_backward(grad_RO, *ctx.saved_tensors)
    return grad_rows_RI, grad_weight_LOI, None  # the offsets are integers


grouped_linear.register_autograd(_backward, setup_context=_setup)


# -- the three products -----------------------------------------------------------------------------------------------


def _map(rows_RI: Tensor, weight_LOI: Tensor, expert_offsets: Tensor, has_tail: bool) -> Tensor:
    """rows of expert l @ weight[l].T: [R, O]."""
    if _one_gemm_serves(rows_RI, weight_LOI):
        return _product(rows_RI, _packed(weight_LOI).transpose(1, 2), expert_offsets, has_tail)
    out_RO = rows_RI.new_zeros(rows_RI.shape[0], weight_LOI.shape[1])
    for local_idx, rows in _ranges(expert_offsets, rows_RI.shape[0]):
        out_RO[rows] = F.linear(rows_RI[rows], weight_LOI[local_idx])
    return out_RO


def _map_rows_back(grad_RO: Tensor, weight_LOI: Tensor, expert_offsets: Tensor, has_tail: bool) -> Tensor:
    """grads of expert l @ weight[l]: [R, I]."""
    if _one_gemm_serves(grad_RO, weight_LOI):
        return _product(grad_RO, _packed(weight_LOI), expert_offsets, has_tail)
    grad_rows_RI = grad_RO.new_zeros(grad_RO.shape[0], weight_LOI.shape[2])
    for local_idx, rows in _ranges(expert_offsets, grad_RO.shape[0]):
        grad_rows_RI[rows] = grad_RO[rows] @ weight_LOI[local_idx]
    return grad_rows_RI


def weight_grad(grad_RO: Tensor, rows_RI: Tensor, shape_LOI: Sequence[int], expert_offsets: Tensor) -> Tensor:
    """grads.T of expert l @ rows of expert l: [L, O, I] in the dtype of the rows, zero where it has none."""
    if grad_RO.shape[0] > 0 and one_gemm_serves(grad_RO.device, grad_RO.dtype, shape_LOI):
        # Transposed before row-major: the one form that takes ranges of any length, 0 included.
        return _grouped(_packed(grad_RO).t(), _packed(rows_RI), expert_offsets)
    grad_weight_LOI = rows_RI.new_zeros(tuple(shape_LOI))
    for local_idx, rows in _ranges(expert_offsets, grad_RO.shape[0]):
        grad_weight_LOI[local_idx] = grad_RO[rows].t() @ rows_RI[rows]
    return grad_weight_LOI


def _one_gemm_serves(rows: Tensor, weight_LOI: Tensor) -> bool:
    return rows.shape[0] > 0 and one_gemm_serves(rows.device, rows.dtype, weight_LOI.shape)


def _product(rows: Tensor, matrices: Tensor, expert_offsets: Tensor, has_tail: bool) -> Tensor:
    out = _grouped(_packed(rows), matrices, expert_offsets)
    if has_tail:  # which the GEMM leaves unwritten
        zero_tail(out, expert_offsets)
    return out


def _grouped(a: Tensor, b: Tensor, expert_offsets: Tensor) -> Tensor:
    if _GEMM is None:
        raise RuntimeError("this PyTorch has no grouped GEMM; one_gemm_serves says so beforehand.")
    return _GEMM(a, b, offs=expert_offsets[1:])


def _packed(tensor: Tensor) -> Tensor:
    """Contiguous, at an address that the grouped GEMM can read from."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _GEMM_BYTES == 0 else tensor.clone()


def _ranges(expert_offsets: Tensor, num_rows: int) -> Iterator[tuple[int, slice]]:
    """The rows of each expert that has any."""
    offsets = expert_offsets.tolist() if num_rows else []
    for local_idx, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if end > begin:
            yield local_idx, slice(begin, end)
