"""Casts of the rows of several experts, and of their weights, to FP8 blocks in the GEMM's layout (`moe_ep.fp8.matrix`).

Rows keep one scale a 1x128 block. Their transpose, which the weights' gradient multiplies, has blocks of 128 rows of
one expert; the last block of an expert may be shorter. Weights have one scale a 128x128 block, and their transpose the
same bytes and scales, transposed. The arithmetic of a block is that of `moe_ep.fp8.cast`, whatever its shape.

On CUDA with the extension one kernel does each cast (csrc/fp8/tiles.h), where the sizes are multiples of 16 and the
dtype is bfloat16 or float32; elsewhere PyTorch does it, with the same bits.

Letters: L experts, R rows, K their width, B = ceil(K / 128), F ffn width, O and I outputs and inputs of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep._native.arguments import address, dtype_name
from moe_ep.fp8.cast import BLOCK_ELEMS, dequantize_1x128, num_blocks, quantize_1x128
from moe_ep.fp8.matrix import Fp8Matrices, RowRanges, Scaling, round_up, row_scales, split_columns, split_rows

_KERNEL_DTYPES: Final = (torch.bfloat16, torch.float32)
_KERNEL_STEP: Final = 16  # elements: what the kernels ask of widths and of rows


@dataclass(frozen=True, eq=False)
class Fp8Cast:
    """What a cast gave: the rows, their transpose, or both; nothing for what was not asked for."""

    rows: Fp8Matrices
    columns: Fp8Matrices


def cast_rows(
    x_RK: Tensor, ranges: RowRanges, power_of_two: bool, *, rows: bool = True, columns: bool = False
) -> Fp8Cast:
    """Cast the rows of all experts, and (or) their transpose.

    Args:
        x_RK: [R, K] bfloat16, float16 or float32.
        ranges: the rows of each expert.
        power_of_two: scales are powers of two.
        rows, columns: what to make; both from one reading.
    """
    if kernel_serves(x_RK, ranges):
        return _launch(_Source("rows", x_RK.contiguous()), x_RK.shape[1], ranges, power_of_two, rows, columns)
    parts = ranges.split(x_RK)
    return Fp8Cast(
        _matrices([_rows(part, power_of_two) for part in parts] if rows else [], "rows"),
        _matrices([_columns(part, power_of_two) for part in parts] if columns else [], "rows"),
    )


def cast_swiglu(
    projected_R2F: Tensor,
    row_weights_R: Tensor | None,
    ranges: RowRanges,
    power_of_two: bool,
    *,
    rows: bool = True,
    columns: bool = False,
) -> Fp8Cast:
    """weight * silu(gate) * up in FP8 without writing it in between, as `cast_rows` does.

    Args:
        projected_R2F: [R, 2F], gate then up, of which `kernel_serves` the halves.
        row_weights_R: [R] float32; None is 1 everywhere.
        ranges, power_of_two, rows, columns: as in `cast_rows`.
    """
    weights_R = _contiguous_weights(row_weights_R, projected_R2F)
    source = _Source("swiglu", projected_R2F.contiguous(), row_weights=weights_R)
    return _launch(source, projected_R2F.shape[1] // 2, ranges, power_of_two, rows, columns)


def cast_swiglu_grad(
    projected_R2F: Tensor,
    row_weights_R: Tensor | None,
    grad_out_RF: Tensor,
    ranges: RowRanges,
    power_of_two: bool,
    *,
    rows: bool,
    columns: bool,
) -> tuple[Fp8Cast, Tensor | None]:
    """The gradient of `projected` in FP8 without writing it, and that of the weights.

    Args:
        projected_R2F, row_weights_R: as in `cast_swiglu`.
        grad_out_RF: [R, F], the gradient of weight * silu(gate) * up, dtype of projected.
        ranges, power_of_two: as in `cast_rows`.
        rows, columns: at least one of them, which the sums of the weights ride on.

    Returns:
        The cast, and sum over F of grad_out * silu(gate) * up: [R] float32, added up in an order that F alone decides;
        None without weights.
    """
    assert rows or columns
    weights_R = _contiguous_weights(row_weights_R, projected_R2F)
    sums_RB = None
    if row_weights_R is not None:
        sums_RB = weights_R.new_empty(len(weights_R), num_blocks(grad_out_RF.shape[1]))
    grads_RF = grad_out_RF.contiguous()
    source = _Source("swiglu_grad", projected_R2F.contiguous(), None, grads_RF, weights_R, sums_RB)
    cast = _launch(source, projected_R2F.shape[1], ranges, power_of_two, rows, columns)
    return cast, None if sums_RB is None else sums_RB.sum(dim=1)


def pack_scales(scales_RB: Tensor, ranges: RowRanges) -> Tensor:
    """Row-major scales, as they travel, in the GEMM's layout, one block an expert: flat float32.

    Args:
        scales_RB: [R, B] float32, any strides.
        ranges: the rows of each expert.
    """
    if scales_RB.is_cuda and _is_stepped(*ranges.sizes) and (kernels := _native.load()) is not None:
        scales_RB = scales_RB.contiguous()
        packed = torch.empty(scales_RB.numel(), dtype=torch.float32, device=scales_RB.device)
        with torch.cuda.device(scales_RB.device):
            kernels.fp8_pack_scales(
                scales=scales_RB.data_ptr(),
                tiles=ranges.tiles.data_ptr(),
                num_tiles=len(ranges.tiles),
                num_blocks=scales_RB.shape[1],
                packed=packed.data_ptr(),
                stream=torch.cuda.current_stream().cuda_stream,
            )
        return packed
    parts = [row_scales(scales_RB[part]).flatten() for part in ranges.slices]
    return torch.cat(parts) if parts else scales_RB.new_empty(0)


def transpose_rows(data_RK: Tensor, packed: Tensor, ranges: RowRanges, power_of_two: bool) -> Fp8Matrices:
    """FP8 rows cast anew for the weights' gradient, from their own values rounded to bfloat16.

    With scales that are powers of two nothing is lost but what falls below the smallest step of the new block.

    Args:
        data_RK: [R, K] float8_e4m3fn.
        packed: scales as `pack_scales` gave them.
    """
    if data_RK.is_cuda and _is_stepped(data_RK.shape[1], *ranges.sizes) and _native.load() is not None:
        source = _Source("fp8", data_RK.contiguous(), scales=packed)
        return _launch(source, data_RK.shape[1], ranges, power_of_two, False, True).columns
    columns = []
    for matrix in split_rows(data_RK, packed, ranges):
        scales_RB = matrix.scales[:, : len(matrix.data)].t()
        columns.append(_columns(dequantize_1x128(matrix.data, scales_RB, torch.bfloat16), power_of_two))
    return _matrices(columns, "rows")


def cast_weights(weight_LOI: Tensor, power_of_two: bool, *, columns: bool) -> Fp8Cast:
    """Weights with one scale a 128x128 block: [O, I] of each expert, and [I, O].

    Args:
        weight_LOI: [L, O, I] bfloat16, float16 or float32.
        power_of_two: scales are powers of two.
        columns: make [I, O] too, which only a backward multiplies.
    """
    num_experts, outputs, inputs = weight_LOI.shape
    ranges = RowRanges((outputs,) * num_experts, weight_LOI.device)
    flat = weight_LOI.reshape(-1, inputs)
    if kernel_serves(flat, ranges):
        return _launch_weights(flat, inputs, outputs, num_experts, ranges, power_of_two, columns)
    tiles = [_cast_tiles(weight_OI, power_of_two) for weight_OI in weight_LOI]
    turned = [(_transpose_bytes(codes), _tile_scales(scales.t())) for codes, scales in tiles if columns]
    return Fp8Cast(
        _matrices([(codes, _tile_scales(scales)) for codes, scales in tiles], "tiles"), _matrices(turned, "tiles")
    )


# -- by PyTorch -------------------------------------------------------------------------------------------------------


def _matrices(made: list[tuple[Tensor, Tensor]], scaling: Scaling) -> Fp8Matrices:
    """Of data and scales, made expert by expert."""
    codes = [data.view(torch.uint8) for data, _ in made]
    return Fp8Matrices(codes, [scales for _, scales in made], torch.float8_e4m3fn, scaling)


def _rows(x_RK: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    codes, scales = quantize_1x128(x_RK, power_of_two)
    return codes, row_scales(scales)


def _columns(x_RK: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    if not len(x_RK):
        padded = round_up(x_RK.shape[1], 4)
        empty = torch.empty(x_RK.shape[1], 0, dtype=torch.float8_e4m3fn, device=x_RK.device)
        return empty, x_RK.new_empty(0, padded, dtype=torch.float32)
    return _rows(x_RK.t(), power_of_two)


def _cast_tiles(weight_OI: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """e4m3 [O, I] and scales [ceil(O / 128), ceil(I / 128)]: each tile is cast as if it were one long block."""
    outputs, inputs = weight_OI.shape
    high, wide = num_blocks(outputs), num_blocks(inputs)
    padded = weight_OI.new_zeros(high * BLOCK_ELEMS, wide * BLOCK_ELEMS)
    padded[:outputs, :inputs] = weight_OI
    tiles = padded.view(high, BLOCK_ELEMS, wide, BLOCK_ELEMS).transpose(1, 2)
    # The row of a tile with the largest element decides; cast with it as the only block, every row gets its scale.
    finite = torch.where(tiles.isfinite(), tiles.abs().float(), 0.0)
    largest = finite.amax(dim=(2, 3))
    marked = torch.zeros(high * wide, BLOCK_ELEMS, dtype=torch.float32, device=weight_OI.device)
    marked[:, 0] = largest.flatten()
    scales = quantize_1x128(marked, power_of_two)[1].view(high, wide)
    inverse = scales.reciprocal()[:, :, None, None]
    codes = (tiles.float() * inverse).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(tiles.isfinite(), codes, 0x7F).transpose(1, 2).reshape(padded.shape)
    return codes[:outputs, :inputs].contiguous().view(torch.float8_e4m3fn), scales


def _tile_scales(scales: Tensor) -> Tensor:
    out = scales.new_ones(scales.shape[0], round_up(scales.shape[1], 4))
    out[:, : scales.shape[1]] = scales
    return out


def _transpose_bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


# -- by the kernels ---------------------------------------------------------------------------------------------------


def kernel_serves(x_RK: Tensor, ranges: RowRanges, halves: bool = False) -> bool:
    """Whether the kernels take these rows; with `halves` (gate and up), whether they take each half of a row."""
    step = 2 * _KERNEL_STEP if halves else _KERNEL_STEP
    if not (x_RK.is_cuda and x_RK.dtype in _KERNEL_DTYPES and x_RK.shape[1] % step == 0 and _is_stepped(*ranges.sizes)):
        return False
    return _native.load() is not None


def _is_stepped(*sizes: int) -> bool:
    return all(size % _KERNEL_STEP == 0 for size in sizes)


@dataclass(frozen=True, eq=False)
class _Source:
    """What a kernel reads, as csrc/fp8/tiles.h names it; all contiguous. Only `weight_sums` is written."""

    name: str
    x: Tensor
    scales: Tensor | None = None
    grads: Tensor | None = None
    row_weights: Tensor | None = None
    weight_sums: Tensor | None = None


def _launch(source: _Source, width: int, ranges: RowRanges, power_of_two: bool, rows: bool, columns: bool) -> Fp8Cast:
    """FP8 rows [R, K], K = width, and their transpose."""
    x = source.x
    num_elems = ranges.num_rows * width
    fp8, wide = torch.float8_e4m3fn, torch.float32
    row_data = x.new_empty(ranges.num_rows if rows else 0, width, dtype=fp8)
    scales = x.new_empty(ranges.num_rows * num_blocks(width) if rows else 0, dtype=wide)
    column_data = x.new_empty(num_elems if columns else 0, dtype=fp8)
    column_scales = x.new_empty(len(ranges.tiles) * width if columns else 0, dtype=wide)
    _call(source, width, ranges, (row_data, scales, column_data, column_scales), False, power_of_two)
    return Fp8Cast(
        split_rows(row_data, scales, ranges) if rows else _matrices([], "rows"),
        split_columns(column_data, column_scales, width, ranges) if columns else _matrices([], "rows"),
    )


def _contiguous_weights(row_weights_R: Tensor | None, projected_R2F: Tensor) -> Tensor:
    """[R] float32: the kernels always weigh."""
    if row_weights_R is None:
        return projected_R2F.new_ones(len(projected_R2F), dtype=torch.float32)
    return row_weights_R.contiguous()


def _launch_weights(
    flat: Tensor, inputs: int, outputs: int, num_experts: int, ranges: RowRanges, power_of_two: bool, columns: bool
) -> Fp8Cast:
    high, wide = num_blocks(outputs), num_blocks(inputs)
    rows = torch.empty(num_experts, outputs, inputs, dtype=torch.float8_e4m3fn, device=flat.device)
    row_tiles = torch.ones(num_experts, high, round_up(wide, 4), device=flat.device)
    turned = rows.new_empty(num_experts if columns else 0, inputs, outputs)
    turned_tiles = torch.ones(num_experts if columns else 0, wide, round_up(high, 4), device=flat.device)
    outs = (rows, row_tiles, turned, turned_tiles)
    _call(_Source("rows", flat.contiguous()), inputs, ranges, outs, True, power_of_two)
    return Fp8Cast(
        Fp8Matrices(rows.view(torch.uint8).unbind(), row_tiles.unbind(), rows.dtype, "tiles"),
        Fp8Matrices(turned.view(torch.uint8).unbind(), turned_tiles.unbind(), turned.dtype, "tiles"),
    )


def _call(
    source: _Source,
    width: int,
    ranges: RowRanges,
    outs: tuple[Tensor, Tensor, Tensor, Tensor],
    one_scale: bool,
    power_of_two: bool,
) -> None:
    row_data, scales, column_data, column_scales = outs
    if not (row_data.numel() or column_data.numel()):  # no rows, or nothing asked for
        return
    with torch.cuda.device(source.x.device):
        _native.require().fp8_cast_tiles(
            source=source.name,
            dtype="bfloat16" if source.name == "fp8" else dtype_name(source.x.dtype),
            x=source.x.data_ptr(),
            x_scales=address(source.scales),
            grads=address(source.grads),
            row_weights=address(source.row_weights),
            tiles=ranges.tiles.data_ptr(),
            num_tiles=len(ranges.tiles),
            width=width,
            rows=address(row_data),
            row_scales=address(scales),
            columns=address(column_data),
            column_scales=address(column_scales),
            weight_sums=address(source.weight_sums),
            one_scale=one_scale,
            power_of_two=power_of_two,
            stream=torch.cuda.current_stream().cuda_stream,
        )
