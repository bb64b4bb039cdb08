"""One linear map per expert over rows sorted by expert, with the row ranges on the device: for compiled graphs.

A compiled graph does not know how many rows an expert has; the ranges stay in a tensor, and the number of rows in the
graph is symbolic. The signature is that of a grouped GEMM (rows, stacked weights, device offsets). Today's body is a
loop over the experts that reads the offsets on the host, with the bits of `torch.nn.functional.linear` per expert.

Letters: L local experts, R rows, I and O inputs and outputs of the map.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
    out_RO = rows_RI.new_zeros(rows_RI.shape[0], weight_LOI.shape[1])
    for local_idx, rows in _ranges(expert_offsets):
        out_RO[rows] = F.linear(rows_RI[rows], weight_LOI[local_idx])
    return out_RO


@grouped_linear.register_fake
def _grouped_linear_fake(rows_RI: Tensor, weight_LOI: Tensor, expert_offsets: Tensor) -> Tensor:
    return rows_RI.new_empty(rows_RI.shape[0], weight_LOI.shape[1])


@torch.library.custom_op("moe_ep::grouped_linear_backward", mutates_args=())
def grouped_linear_backward(
    grad_RO: Tensor, rows_RI: Tensor, weight_LOI: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows [R, I] and of the weights [L, O, I]; zero where an expert has no rows."""
    grad_rows_RI, grad_weight_LOI = torch.zeros_like(rows_RI), torch.zeros_like(weight_LOI)
    for local_idx, rows in _ranges(expert_offsets):
        grad_rows_RI[rows] = grad_RO[rows] @ weight_LOI[local_idx]
        grad_weight_LOI[local_idx] = grad_RO[rows].t() @ rows_RI[rows]
    return grad_rows_RI, grad_weight_LOI


@grouped_linear_backward.register_fake
def _grouped_linear_backward_fake(
    grad_RO: Tensor, rows_RI: Tensor, weight_LOI: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows_RI), torch.empty_like(weight_LOI)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_rows_RI, grad_weight_LOI = grouped_linear_backward(grad_RO, *ctx.saved_tensors)
    return grad_rows_RI, grad_weight_LOI, None  # the offsets are integers


grouped_linear.register_autograd(_backward, setup_context=_setup)


def _ranges(expert_offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """The rows of each expert that has any."""
    offsets = expert_offsets.tolist()
    for local_idx, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if end > begin:
            yield local_idx, slice(begin, end)
