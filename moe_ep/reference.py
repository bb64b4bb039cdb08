"""Two oracles, dull on purpose: they share no code with the product and run on one process.

`dense_moe` knows nothing of ranks: every expert sees every token, in float64. `dispatch_loop` and `combine_loop` walk
over ranks, tokens and slots one at a time and write down the order of rows, of sums and of roundings that every
backend must meet bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def dense_moe(
    x_TH: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """y[t] = sum over slots k of weight[t, k] * experts[idx[t, k]](x[t]), slots of -1 left out, in float64.

    Args:
        x_TH: [T, H]; cast to float64, gradients flow through the cast.
        topk_idx_TK: [T, K] ids in [-1, E).
        topk_weights_TK: [T, K].
        experts: E functions from [T, H] to [T, H].
    """
    x_TH, weights_TK = x_TH.double(), topk_weights_TK.double()
    y_TH = torch.zeros_like(x_TH)
    for expert, function in enumerate(experts):
        weight_T = torch.where(topk_idx_TK == expert, weights_TK, 0.0).sum(dim=1)
        y_TH = y_TH + weight_T.unsqueeze(1) * function(x_TH)
    return y_TH


@dataclass(frozen=True)
class LoopRow:
    """One row as one rank receives it; `slots` are the source's slots that it stands for, None for padding."""

    source: tuple[int, int] | None  # (rank, token)
    slots: tuple[int, ...]
    ids: tuple[int, ...]  # local id of each of the K slots (compact) or of the one slot (expert_major)
    weights: tuple[float, ...]


def dispatch_loop(
    topk_idx: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    owner: Sequence[int],
    layout: str = "expert_major",
    alignment: int = 1,
) -> list[list[LoopRow]]:
    """The rows that each rank receives, in order. Inputs are listed by rank: [T_r, K] each; `owner[e]` is a rank.

    Example with two ranks, one token each, E = 2, K = 2: token 0 of rank 0 names experts 1 and 0, token 0 of rank 1
    names expert 1 twice. In expert_major rank 0 receives one row, rank 1 three: (0, slot 0), (1, slot 0), (1, slot 1).
    """
    received: list[list[LoopRow]] = []
    for here in range(len(topk_idx)):
        mine = [expert for expert, rank in enumerate(owner) if rank == here]
        rows: list[LoopRow] = []
        if layout == "compact":
            for source, (ids, weights) in enumerate(zip(topk_idx, topk_weights, strict=True)):
                for token, named in enumerate(ids.tolist()):
                    slots = tuple(k for k, expert in enumerate(named) if expert in mine)
                    if slots:
                        local = tuple(mine.index(e) if e in mine else -1 for e in named)
                        beside = zip(named, weights[token].tolist(), strict=True)
                        kept = tuple(weight if expert in mine else 0.0 for expert, weight in beside)
                        rows.append(LoopRow((source, token), slots, local, kept))
        else:
            for local_id, expert in enumerate(mine):
                num_real = 0
                for source, (ids, weights) in enumerate(zip(topk_idx, topk_weights, strict=True)):
                    for token, named in enumerate(ids.tolist()):
                        for slot, named_expert in enumerate(named):
                            if named_expert == expert:
                                weight = float(weights[token, slot])
                                rows.append(LoopRow((source, token), (slot,), (local_id,), (weight,)))
                                num_real += 1
                rows += [LoopRow(None, (), (-1,), (0.0,))] * (-num_real % alignment)
        received.append(rows)
    return received


def rows_of(dispatched: Sequence[LoopRow], x: Sequence[Tensor]) -> Tensor:
    """[R, H] for one rank: the source rows, zeros for padding."""
    zero = torch.zeros_like(x[0][0]) if x[0].shape[0] else x[0].new_zeros(x[0].shape[1])
    rows = [zero if row.source is None else x[row.source[0]][row.source[1]] for row in dispatched]
    return torch.stack(rows) if rows else x[0].new_zeros(0, x[0].shape[1])


def combine_loop(
    rows: Sequence[Tensor],
    dispatched: Sequence[Sequence[LoopRow]],
    num_tokens: Sequence[int],
    weighted: bool,
    exact: bool = False,
    ranks_per_node: int = 1,
) -> list[Tensor]:
    """What comes home on each rank, [T_r, H] each, with every rounding of the contract.

    Args:
        rows: [R_r, H] of each rank, as `dispatch_loop` laid them out.
        dispatched: its result.
        num_tokens: T_r of each rank.
        weighted: multiply each row by its weight first (expert_major).
        exact: add all slots of a token in slot order and round once.
        ranks_per_node: so many ranks, one after the other, add up theirs first, and round; with 1 that changes nothing.
    """
    dtype = rows[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    terms: dict[tuple[int, int], list[tuple[int, int, Tensor]]] = {}
    for rank, received in enumerate(dispatched):
        for value, row in zip(rows[rank], received, strict=True):
            if row.source is not None:
                term = value.to(wide)
                if weighted:
                    term = term * torch.tensor(row.weights[0], dtype=wide)
                terms.setdefault(row.source, []).append((rank, row.slots[0], term))
    home = []
    for source, count in enumerate(num_tokens):
        y_TH = rows[0].new_zeros(count, rows[0].shape[1])
        for token in range(count):
            mine = terms.get((source, token), [])
            if mine and exact:
                y_TH[token] = _add([term for _, _, term in sorted(mine, key=lambda item: item[1])]).to(dtype)
            elif mine:
                by_node: dict[int, list[Tensor]] = {}
                for here in sorted({rank for rank, _, _ in mine}):
                    its = sorted((m for m in mine if m[0] == here), key=lambda item: item[1])
                    by_node.setdefault(here // ranks_per_node, []).append(_rounded([term for _, _, term in its], dtype))
                y_TH[token] = _rounded([_rounded(partials, dtype) for partials in by_node.values()], dtype)
        home.append(y_TH)
    return home


def _add(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _rounded(terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Their sum, rounded to `dtype`, in the dtype of the terms."""
    return _add(terms).to(dtype).to(terms[0].dtype)
