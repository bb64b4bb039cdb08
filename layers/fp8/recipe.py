"""How the FP8 recipes cast: what travels, the operands of the three products, the weights.

    blockwise  1x128 blocks of e4m3 for rows and gradients, 128x128 for weights
    current    one scale a tensor, from its largest element now; e4m3, gradients e5m2
    delayed    the same, from the largest element of this and of earlier calls

The names are Transformer Engine's. A tensor here is what one rank has of all its experts, so the scale is the rank's;
only that of the rows that travel is the group's, which costs one small exchange a forward.

Transformer Engine's delayed scale leaves the present call out, and cuts off what has grown since. Then a forward that
is computed again, behind its own entry in the history, has another scale than at first, and weights that were loaded
are cut off. With the present call in it nothing is, and the second scale is the first.

Letters: T tokens, R rows of all experts, K their width, B = ceil(K / 128), L experts, O and I outputs and inputs,
P width of the first projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

from moe_ep.config import FP8Config
from moe_ep.fp8 import MAX_E4M3, MIN_SCALE, quantize_1x128, up_to_power_of_two
from moe_ep.fp8 import blocks as fp8_blocks
from moe_ep.fp8.blocks import Fp8Cast
from moe_ep.fp8.matrix import Fp8Matrices, RowRanges, split_rows, whole_rows
from moe_ep.fp8.rows import Fp8Rows
from moe_ep.layers.activations import Activation, activation_grad, weighted_activate

GroupMax = Callable[[Tensor], Tensor]  # the largest over the ranks of a float32 scalar; collective

_HISTORY: Final = 1024  # calls whose largest elements the delayed recipe remembers, as Transformer Engine's default
_LARGEST: Final = {torch.float8_e4m3fn: MAX_E4M3, torch.float8_e5m2: 57344.0}


class Fp8Recipe(Protocol):
    """Casts; every call is on the stream of the caller, and only `payload` may exchange.

    Activations and their gradients are written and then cast, where a recipe does not know better.
    """

    alignment: int  # rows of an expert are padded to a multiple of it

    def payload(self, x_TK: Tensor, group_max: GroupMax) -> tuple[Tensor, Tensor]:
        """What travels: e4m3 [T, K], and float32 scales [T, B], or [1] where all ranks have the same."""

    def arrived(self, rows: Fp8Rows, ranges: RowRanges) -> Fp8Matrices:
        """Rows as they came: [rows, K] of each expert."""

    def transposed(self, rows: Fp8Rows, ranges: RowRanges) -> Fp8Matrices:
        """The same for the weights' gradient: [K, rows] of each expert."""

    def activations(
        self,
        projected: Tensor,
        row_weights: Tensor | None,
        activation: Activation,
        ranges: RowRanges,
        *,
        rows: bool = False,
        columns: bool = False,
    ) -> Fp8Cast:
        """weight * activate(projected): [rows, F] of each expert, the transpose, or both; no weights are 1."""
        inner = weighted_activate(projected, row_weights, activation)
        return self.cast("inner", inner, ranges, rows=rows, columns=columns)

    def activation_grads(
        self,
        projected: Tensor,
        row_weights: Tensor | None,
        grad_inner: Tensor,
        activation: Activation,
        ranges: RowRanges,
        *,
        rows: bool,
        columns: bool,
    ) -> tuple[Fp8Cast, Tensor | None]:
        """The gradients, from that of what `activations` casts: of projected, [rows, P] of each expert, the transpose,
        or both; and of the weights, [R] float32, if there are any."""
        grad_projected, grad_weights = activation_grad(projected, row_weights, grad_inner, activation)
        return self.cast("grad_projected", grad_projected, ranges, rows=rows, columns=columns), grad_weights

    def cast(self, name: str, x_RK: Tensor, ranges: RowRanges, *, rows: bool, columns: bool) -> Fp8Cast:
        """Rows, their transpose, or both. Names that begin with "grad" are gradients."""

    def weights(self, name: str, weight_LOI: Tensor, *, columns: bool) -> Fp8Cast:
        """[O, I] of each expert, and [I, O] if `columns`."""


def make_recipe(config: FP8Config) -> Fp8Recipe:
    """The recipe of the name."""
    if config.recipe == "blockwise":
        return Blockwise(config.power_of_two_scales)
    return PerTensor(config.recipe == "delayed", config.power_of_two_scales)


class Blockwise(Fp8Recipe):
    """One scale for 1x128 elements, and for 128x128 of a weight. SwiGLU and its gradient are cast unwritten on CUDA."""

    alignment = 16

    def __init__(self, power_of_two: bool) -> None:
        self._power_of_two = power_of_two

    def payload(self, x_TK: Tensor, group_max: GroupMax) -> tuple[Tensor, Tensor]:
        return quantize_1x128(x_TK, self._power_of_two)

    def arrived(self, rows: Fp8Rows, ranges: RowRanges) -> Fp8Matrices:
        return split_rows(rows.data, fp8_blocks.pack_scales(rows.scales, ranges), ranges)

    def transposed(self, rows: Fp8Rows, ranges: RowRanges) -> Fp8Matrices:
        packed = fp8_blocks.pack_scales(rows.scales, ranges)
        return fp8_blocks.transpose_rows(rows.data, packed, ranges, self._power_of_two)

    def activations(
        self,
        projected: Tensor,
        row_weights: Tensor | None,
        activation: Activation,
        ranges: RowRanges,
        *,
        rows: bool = False,
        columns: bool = False,
    ) -> Fp8Cast:
        if activation == "swiglu" and fp8_blocks.kernel_serves(projected, ranges, halves=True):
            return fp8_blocks.cast_swiglu(
                projected, row_weights, ranges, self._power_of_two, rows=rows, columns=columns
            )
        return super().activations(projected, row_weights, activation, ranges, rows=rows, columns=columns)

    def activation_grads(
        self,
        projected: Tensor,
        row_weights: Tensor | None,
        grad_inner: Tensor,
        activation: Activation,
        ranges: RowRanges,
        *,
        rows: bool,
        columns: bool,
    ) -> tuple[Fp8Cast, Tensor | None]:
        served = activation == "swiglu" and fp8_blocks.kernel_serves(projected, ranges, halves=True)
        if served and (rows or columns):
            return fp8_blocks.cast_swiglu_grad(
                projected, row_weights, grad_inner, ranges, self._power_of_two, rows=rows, columns=columns
            )
        return super().activation_grads(
            projected, row_weights, grad_inner, activation, ranges, rows=rows, columns=columns
        )

    def cast(self, name: str, x_RK: Tensor, ranges: RowRanges, *, rows: bool, columns: bool) -> Fp8Cast:
        return fp8_blocks.cast_rows(x_RK, ranges, self._power_of_two, rows=rows, columns=columns)

    def weights(self, name: str, weight_LOI: Tensor, *, columns: bool) -> Fp8Cast:
        return fp8_blocks.cast_weights(weight_LOI, self._power_of_two, columns=columns)


class PerTensor(Fp8Recipe):
    """One scale a tensor: from its own largest element, or (delayed) from that of earlier calls where it is larger.

    The history is not part of a state dict.
    """

    alignment = 16

    def __init__(self, delayed: bool, power_of_two: bool) -> None:
        self._delayed, self._power_of_two = delayed, power_of_two
        self._history: dict[str, Tensor] = {}
        self._num_calls: dict[str, int] = {}

    def payload(self, x_TK: Tensor, group_max: GroupMax) -> tuple[Tensor, Tensor]:
        # Of the histories, not the elements: so the scale is the group's even where ranks remember different calls.
        scale = self._scale(group_max(self._largest("rows", x_TK)), torch.float8_e4m3fn)
        return _cast(x_TK, scale, torch.float8_e4m3fn), scale

    def arrived(self, rows: Fp8Rows, ranges: RowRanges) -> Fp8Matrices:
        return whole_rows(rows.data, rows.scales, ranges)

    def transposed(self, rows: Fp8Rows, ranges: RowRanges) -> Fp8Matrices:
        return _transposed(self.arrived(rows, ranges))

    def cast(self, name: str, x_RK: Tensor, ranges: RowRanges, *, rows: bool, columns: bool) -> Fp8Cast:
        dtype = torch.float8_e5m2 if name.startswith("grad") else torch.float8_e4m3fn
        scale = self._scale(self._largest(name, x_RK), dtype)
        codes = _cast(x_RK, scale, dtype)
        made = whole_rows(codes, scale, ranges)
        nothing = made[:0]
        return Fp8Cast(made if rows else nothing, _transposed(made) if columns else nothing)

    def weights(self, name: str, weight_LOI: Tensor, *, columns: bool) -> Fp8Cast:
        scale = self._scale(self._largest(name, weight_LOI), torch.float8_e4m3fn)
        codes_LOI = _cast(weight_LOI, scale, torch.float8_e4m3fn)
        codes = codes_LOI.view(torch.uint8).unbind()
        made = Fp8Matrices(codes, [scale] * len(codes), codes_LOI.dtype, "tensor")
        return Fp8Cast(made, _transposed(made) if columns else made[:0])

    def _scale(self, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """[1] float32."""
        scale = (largest / _LARGEST[dtype]).clamp(min=MIN_SCALE).reshape(1)
        return up_to_power_of_two(scale) if self._power_of_two else scale

    def _largest(self, name: str, x: Tensor) -> Tensor:
        """What the scale of x goes by: float32 scalar."""
        largest = _largest_finite(x)
        if not self._delayed:
            return largest
        history = self._history.get(name)
        if history is None or history.device != largest.device:
            history = self._history[name] = largest.new_zeros(_HISTORY)
            self._num_calls[name] = 0
        history[self._num_calls[name] % _HISTORY] = largest
        self._num_calls[name] += 1
        return history.max()


def _largest_finite(x: Tensor) -> Tensor:
    """Float32 scalar; 0 for an empty tensor."""
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return torch.where(x.isfinite(), x.abs(), 0.0).max().float()


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale; what is not finite becomes NaN, as in blocks, and is not hidden behind the largest number."""
    limit = _LARGEST[dtype]
    codes = (x.float() * scale.reciprocal()).clamp(-limit, limit)  # rounding may carry it past the limit
    return torch.where(x.isfinite(), codes, torch.nan).to(dtype)


def _transposed(matrices: Fp8Matrices) -> Fp8Matrices:
    codes = [codes_NK.t().contiguous() for codes_NK in matrices.codes]
    return Fp8Matrices(codes, matrices.scales, matrices.dtype, matrices.scaling)
