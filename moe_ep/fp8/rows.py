"""FP8 rows as a dispatch hands them out, with the tensor that carries their gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep.fp8.blocks import pack_scales
from moe_ep.fp8.cast import dequantize_1x128
from moe_ep.fp8.matrix import Fp8Matrices, RowRanges, split_rows, whole_rows


@dataclass(frozen=True, eq=False)
class Fp8Rows:
    """Received rows: bytes and scales beside the graph, and a face in it.

    Autograd drops the gradient of an FP8 tensor without a word, so the bytes never enter a graph. Whoever multiplies
    them gives the gradient of the rows to `face`; its backward takes it home.

    Attributes:
        face: [R, H] in the dtype of the rows that were sent, without memory of its own: every element is NaN, so that
            nobody computes with it by mistake.
        data: [R, H] float8_e4m3fn, padding 0.
        scales: [R, ceil(H / 128)] float32, or [1] where all rows share one; padding 1.
        sizes: rows of each local expert, padding included.
    """

    face: Tensor
    data: Tensor
    scales: Tensor
    sizes: tuple[int, ...]

    def dequantize(self) -> Tensor:
        """[R, H] ordinary rows, in the dtype of `face`; differentiable: their gradient is that of the rows."""
        rows: Tensor = _Dequantize.apply(self.face, self)  # type: ignore[no-untyped-call]
        return rows

    def matrices(self) -> Fp8Matrices:
        """One [rows, H] matrix an expert, its scales in the layout of the GEMM."""
        ranges = RowRanges(self.sizes, self.data.device)
        if self.scales.dim() == 1:
            return whole_rows(self.data, self.scales, ranges)
        return split_rows(self.data, pack_scales(self.scales, ranges), ranges)

    def values(self, dtype: torch.dtype) -> Tensor:
        """[R, H] in `dtype`, outside of any graph."""
        if self.scales.dim() == 1:
            return (self.data.float() * self.scales).to(dtype)
        return dequantize_1x128(self.data, self.scales, dtype)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, face: Tensor, rows: Fp8Rows) -> Tensor:
        return rows.values(face.dtype)

    @staticmethod
    def backward(ctx: object, grad_rows: Tensor) -> tuple[Tensor, None]:
        return grad_rows, None  # straight through: the cast counts as the identity
