"""Small row operations of the portable backend."""

from __future__ import annotations

import torch
from torch import Tensor


def take(source: Tensor, index_R: Tensor, fill: float) -> Tensor:
    """Rows `source[index_R]`; where the index is negative, `fill`."""
    if source.shape[0] == 0:
        return source.new_full((index_R.shape[0], *source.shape[1:]), fill)
    taken = source.index_select(0, index_R.clamp(min=0))
    return taken.index_fill_(0, (index_R < 0).nonzero()[:, 0], fill)


def resize(rows: Tensor, num_rows: int, fill: float) -> Tensor:
    """The first `num_rows` rows, with rows of `fill` behind them where there are fewer."""
    if rows.shape[0] >= num_rows:
        return rows[:num_rows]
    return torch.cat([rows, rows.new_full((num_rows - rows.shape[0], *rows.shape[1:]), fill)])


def poison(dtype: torch.dtype) -> float:
    """What fills the rows of a call that received too many: NaN, FP8's NaN for bytes, -1 for other integers."""
    if dtype.is_floating_point:
        return float("nan")
    return 0x7F if dtype == torch.uint8 else -1
