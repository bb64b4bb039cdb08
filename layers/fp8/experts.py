"""Both projections of the experts as FP8 products, forward and backward: one `autograd.Function` with ordinary faces.

    projected = rows @ first.T                  rows as they came, or cast once
    inner     = weight * activate(projected)    cast once; the routing weight of each row, or 1
    out       = inner @ down.T

backward, with the gradient of out cast once for both of its products:

    d_inner     = d_out @ down                  d_down   = d_out.T @ inner
    d_projected = weight * activate'(d_inner)   d_weight = sum over F of d_inner * activate(projected)
    d_rows      = d_projected @ first           d_first  = d_projected.T @ rows

A product over K needs both operands with their scales along K. The rows came with scales along H, so for d_first they
are transposed and cast anew, from their own FP8 values. inner is not kept but computed again from projected.

Letters: L experts, R rows, H hidden, F ffn width, P = 2F (SwiGLU) or F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ep.autograd.once import once_differentiable
from moe_ep.config import MoEConfig
from moe_ep.fp8.blocks import Fp8Cast
from moe_ep.fp8.matrix import Fp8Matrices, RowRanges, check_sizes
from moe_ep.fp8.rows import Fp8Rows
from moe_ep.layers.activations import Activation, activation_grad, weighted_activate
from moe_ep.layers.fp8.gemm import GroupedGemm, make_gemm
from moe_ep.layers.fp8.recipe import Fp8Recipe, make_recipe
from moe_ep.layers.fp8.weights import CastWeights, Fingerprint, identity_of
from moe_ep.layers.grouped_linear import weight_grad


class Fp8Experts:
    """Runs the experts of one layer in FP8. No module: it has no parameters, and nothing of it is in a state dict.

    Attributes:
        gemm: what multiplies; `gemm.name` is "te", "cublas" or "plain".
        recipe: what casts.
    """

    def __init__(self, config: MoEConfig) -> None:
        """Choose recipe and GEMM.

        Raises:
            ConfigError: this machine cannot run them.
        """
        self.gemm: GroupedGemm = make_gemm(config.fp8)
        self.recipe: Fp8Recipe = make_recipe(config.fp8)
        self.activation: Activation = config.activation
        self.wgrad = config.fp8.wgrad
        self._cast = CastWeights()
        self._marks: dict[str, Fingerprint] = {}

    def look_at(self, **weights_LOI: Tensor) -> None:
        """Takes the fingerprints of the weights ahead of a forward, so that it need not wait for them."""
        self._marks = {
            name: Fingerprint.of(weight) for name, weight in weights_LOI.items() if not _is_capturing(weight)
        }

    def forget_weights(self) -> None:
        """Casts the weights anew at the next forward, whether or not a change is to be seen."""
        self._cast.forget()

    def __call__(
        self,
        rows: Tensor | Fp8Rows,
        row_weights_R: Tensor | None,
        sizes: Sequence[int],
        first_LPH: Tensor,
        down_LHF: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Applies every expert to its rows; differentiable once.

        Args:
            rows: FP8 rows of a dispatch, or [R, H] ordinary ones, which are cast here.
            row_weights_R: [R] float32 by which each row's result is multiplied, with a gradient; None for 1.
            sizes: L numbers of rows, padding included, multiples of `recipe.alignment`.
            first_LPH, down_LHF: the weights.
            dtype: of the results of the products; gradients of weights have the weights' own.

        Returns:
            [R, H] in `dtype`.

        Raises:
            ValueError: rows of an expert are not padded.
        """
        check_sizes(sizes, self.recipe.alignment)
        if not isinstance(rows, Fp8Rows):
            data, scales = self.recipe.payload(rows.detach(), lambda largest: largest)
            rows = Fp8Rows(rows, data, scales, tuple(sizes))
        marks, self._marks = self._marks, {}
        # The transposed weights make gradients of rows and of inner; without a backward they are not made, nor kept.
        of_rows = torch.is_grad_enabled() and rows.face.requires_grad
        others = [tensor for tensor in (row_weights_R, first_LPH, down_LHF) if tensor is not None]
        of_inner = of_rows or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in others))
        first = self._weight("first", marks, first_LPH, of_rows)
        down = self._weight("down", marks, down_LHF, of_inner)
        weights = Weights(first.rows, first.columns, down.rows, down.columns)
        ranges = RowRanges(tuple(sizes), rows.data.device)
        out: Tensor = _Mlp.apply(  # type: ignore[no-untyped-call]
            rows.face, row_weights_R, first_LPH, down_LHF, rows, weights, ranges, self, dtype
        )
        return out

    def _weight(self, name: str, marks: dict[str, Fingerprint], weight_LOI: Tensor, columns: bool) -> Fp8Cast:
        mark = marks.get(name)
        if _is_capturing(weight_LOI):
            mark = None
        elif mark is None or mark.identity != identity_of(weight_LOI):  # of a forward that did not come so far
            mark = Fingerprint.of(weight_LOI)
        weight = weight_LOI.detach()
        return self._cast.get(name, mark, columns, lambda: self.recipe.weights(name, weight, columns=columns))


@dataclass(frozen=True, eq=False)
class Weights:
    """Both weights in FP8, as forward multiplies them and as the gradient of their input does, if that is wanted."""

    first: Fp8Matrices
    first_transposed: Fp8Matrices
    down: Fp8Matrices
    down_transposed: Fp8Matrices


class _Mlp(torch.autograd.Function):
    """Rows, weights and results are ordinary tensors; what is FP8 stays inside."""

    @staticmethod
    def forward(
        ctx: Any,
        face_RH: Tensor,
        row_weights_R: Tensor | None,
        first_LPH: Tensor,
        down_LHF: Tensor,
        rows: Fp8Rows,
        weights: Weights,
        ranges: RowRanges,
        engine: Fp8Experts,
        dtype: torch.dtype,
    ) -> Tensor:
        recipe = engine.recipe
        projected = rows.data.new_empty(ranges.num_rows, first_LPH.shape[1], dtype=dtype)
        engine.gemm(weights.first, recipe.arrived(rows, ranges), ranges.split(projected))
        out = rows.data.new_empty(ranges.num_rows, down_LHF.shape[1], dtype=dtype)
        inner = recipe.activations(projected, row_weights_R, engine.activation, ranges, rows=True).rows
        engine.gemm(weights.down, inner, ranges.split(out))
        ctx.engine, ctx.weights, ctx.ranges, ctx.face_dtype = engine, weights, ranges, face_RH.dtype
        ctx.likes = [(weight.shape, weight.dtype) for weight in (first_LPH, down_LHF)]
        ctx.save_for_backward(projected, row_weights_R, rows.data, rows.scales)
        return out

    @staticmethod
    @once_differentiable("MoELayer")
    def backward(ctx: Any, grad_out_RH: Tensor) -> tuple[Tensor | None, ...]:
        engine, weights, ranges = ctx.engine, ctx.weights, ctx.ranges
        recipe: Fp8Recipe = engine.recipe
        wants_rows, _, wants_first, wants_down = ctx.needs_input_grad[:4]
        projected, row_weights_R, data, scales = ctx.saved_tensors
        rows = Fp8Rows(data, data, scales, ranges.sizes)
        grad_out_RH = grad_out_RH.to(projected.dtype)
        in_fp8 = engine.wgrad == "fp8"

        # Both operands are cast before the first of two products, so that the second follows it without a gap.
        grads = recipe.cast("grad_out", grad_out_RH, ranges, rows=True, columns=wants_down and in_fp8)
        inner = None
        if wants_down and in_fp8:
            inner = recipe.activations(projected, row_weights_R, engine.activation, ranges, columns=True).columns
        grad_inner = projected.new_empty(ranges.num_rows, ctx.likes[1][0][2])
        engine.gemm(weights.down_transposed, grads.rows, ranges.split(grad_inner))
        grad_down = None
        if inner is not None:
            grad_down = _weight_grad(engine.gemm, ctx.likes[1], inner, grads.columns, ranges)
        elif wants_down:
            inner_RF = weighted_activate(projected, row_weights_R, engine.activation)
            grad_down = weight_grad(grad_out_RH, inner_RF, ctx.likes[1][0], ranges.offsets)
            del inner_RF
        del inner, grads

        grad_projected, transposed = None, None
        if in_fp8:
            grads, grad_weights = recipe.activation_grads(
                projected, row_weights_R, grad_inner, engine.activation, ranges, rows=wants_rows, columns=wants_first
            )
            transposed = recipe.transposed(rows, ranges) if wants_first else None
        else:
            grad_projected, grad_weights = activation_grad(projected, row_weights_R, grad_inner, engine.activation)
            grads = recipe.cast("grad_projected", grad_projected, ranges, rows=wants_rows, columns=False)
        del grad_inner
        grad_rows = None
        if wants_rows:
            grad_rows = torch.empty(rows.data.shape, dtype=ctx.face_dtype, device=rows.data.device)
            engine.gemm(weights.first_transposed, grads.rows, ranges.split(grad_rows))
        grad_first = None
        if transposed is not None:
            grad_first = _weight_grad(engine.gemm, ctx.likes[0], transposed, grads.columns, ranges)
        elif wants_first and grad_projected is not None:
            grad_first = weight_grad(grad_projected, rows.values(projected.dtype), ctx.likes[0][0], ranges.offsets)
        return (
            grad_rows,  # face
            grad_weights,  # row weights
            None if grad_first is None else grad_first.to(ctx.likes[0][1]),  # first
            None if grad_down is None else grad_down.to(ctx.likes[1][1]),  # down
            *[None] * 5,  # the FP8 rows (their gradient goes to the face), weights in FP8, ranges, engine, dtype
        )


def _weight_grad(
    gemm: GroupedGemm,
    like: tuple[torch.Size, torch.dtype],
    rows: Fp8Matrices,
    grads: Fp8Matrices,
    ranges: RowRanges,
) -> Tensor:
    """[L, O, I] = grads[l] @ rows[l].T."""
    out_LOI = torch.empty(like[0], dtype=like[1], device=ranges.device)
    gemm(rows, grads, out_LOI.unbind())
    return out_LOI


def _is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which the host can wait for nothing."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
