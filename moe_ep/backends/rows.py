"""Small row operations of the portable backend."""

from __future__ import annotations

from collections.abc import Sequence

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


def pairs_by(slot_owner_TK: Tensor, owners: Sequence[int]) -> Tensor:
    """[P, 3] (place among `owners`, token, slot) of the slots that one of them owns, ascending."""
    numbers = torch.tensor(owners, device=slot_owner_TK.device).view(-1, 1, 1)
    return (slot_owner_TK.unsqueeze(0) == numbers).nonzero()


def slots_of(
    values_SK: Tensor, token_S: Tensor, slot_owner_TK: Tensor, counts: Sequence[int], first_owner: int = 0
) -> Tensor:
    """[T, K]: of each slot the value that its owner sent, 0 where nobody did.

    Args:
        values_SK: rows in owner order, of which only the owner's slots count.
        token_S: the token of each row.
        slot_owner_TK: who owns each slot.
        counts: rows of each owner, from number `first_owner` on.
    """
    owner_S = first_owner + torch.repeat_interleave(torch.tensor(counts, device=values_SK.device))
    owned_SK = slot_owner_TK.index_select(0, token_S) == owner_S.unsqueeze(1)
    out_TK = values_SK.new_zeros(slot_owner_TK.shape)
    row, slot = owned_SK.nonzero(as_tuple=True)
    out_TK[token_S[row], slot] = values_SK[row, slot]
    return out_TK


def pack_ids(token_S: Tensor, ids_SK: Tensor, weights_SK: Tensor | None) -> Tensor:
    """[S, 1 + K words of ids + those of weights] int32: what travels with the rows of a plan."""
    words = [token_S.int().unsqueeze(1), ids_SK.int()]
    if weights_SK is not None:
        words.append(weights_SK.contiguous().view(torch.int32))
    return torch.cat(words, dim=1)


def unpack_ids(words: Tensor, num_topk: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse of `pack_ids`: tokens [S] int32, ids [S, K] int64, weights [S, K] of `dtype`, or None."""
    past_ids, weights_SK = 1 + num_topk, None
    if dtype is not None:
        own_memory = words[:, past_ids:].clone(memory_format=torch.contiguous_format)
        weights_SK = own_memory.view(dtype)
    return words[:, 0].clone(), words[:, 1:past_ids].long(), weights_SK
