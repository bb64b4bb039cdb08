"""Sums of rows in one written order, so that two runs and two backends give the same bits.

Output n is the sum of some rows, its *terms*. The terms are laid out in rounds: round 0 holds the first term of
every output that has one, round 1 the second, and so on. Within a round every output occurs once, so a round
is a plain indexed add without atomics, and the order in which an output sees its terms is the order of the rounds.

Example with 3 outputs, terms (as row numbers) 0: [4, 1], 1: [], 2: [0, 2, 3]:
round 0 adds row 4 to output 0 and row 0 to output 2; round 1 row 1 to 0 and row 2 to 2; round 2 row 3 to 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 rows, float32 for every other floating dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class OrderedSum:
    """The terms of every output, by rounds.

    Attributes:
        dst: [P] int64, output of each term, ascending within a round.
        src: [P] int64, row of each term.
        round_sizes: terms in each round; their sum is P.
        num_outputs: N; outputs without a term are exactly 0.
    """

    dst: Tensor
    src: Tensor
    round_sizes: tuple[int, ...]
    num_outputs: int

    @classmethod
    def from_terms(cls, dst: Tensor, src: Tensor, num_outputs: int) -> OrderedSum:
        """Builds the rounds from flat terms whose order, per output, is the order of the sum.

        Args:
            dst: [P] int64, in any order; the terms of one output stand in the order in which they are added.
            src: [P] int64, row numbers.
            num_outputs: N. The host reads the size of the rounds once.
        """
        by_output = torch.argsort(dst, stable=True)
        dst, src = dst[by_output], src[by_output]
        num_terms = torch.bincount(dst, minlength=num_outputs)
        first = torch.cumsum(num_terms, 0) - num_terms
        round_idx = torch.arange(dst.numel(), device=dst.device) - first[dst]
        order = torch.argsort(round_idx, stable=True)
        return cls(dst[order], src[order], tuple(torch.bincount(round_idx).tolist()), num_outputs)

    def __call__(self, rows_RH: Tensor, weights_R: Tensor | None = None, bias: Sequence[Tensor] = ()) -> Tensor:
        """Adds the rows up: [R, H] -> [N, H] in the dtype of the rows, rounded once at the end.

        Each product with a weight is rounded to the accumulation dtype before it is added (no fused multiply-add).
        Tensors of `bias`, [N, H] each, are the first terms of every output, in their order.
        """
        wide = accumulation_dtype(rows_RH.dtype)
        total_NH: Tensor | None = None
        for tensor in bias:
            total_NH = tensor.to(wide, copy=True) if total_NH is None else total_NH.add_(tensor.to(wide))
        sizes = list(self.round_sizes)
        for dst, src in zip(torch.split(self.dst, sizes), torch.split(self.src, sizes), strict=True):
            term = rows_RH.index_select(0, src).to(wide)
            if weights_R is not None:
                term.mul_(weights_R.index_select(0, src).to(wide).unsqueeze(1))
            if total_NH is not None:
                total_NH.index_add_(0, dst, term)
            elif dst.numel() == self.num_outputs:
                total_NH = term
            else:
                total_NH = term.new_zeros(self.num_outputs, rows_RH.shape[1]).index_copy_(0, dst, term)
        if total_NH is None:
            return rows_RH.new_zeros(self.num_outputs, rows_RH.shape[1])
        return total_NH.to(rows_RH.dtype)
