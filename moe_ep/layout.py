"""Where every token goes: the integer side of dispatch, in plain tensor operations.

T tokens on this rank, K slots a token, E experts, L of them local, W ranks; S compact rows received (one per token
and rank), R expert-major rows (one per token and expert, padded). Orders come from stable sorts and prefix sums,
never from atomics.

Example: 4 tokens, W = 2, E = 4 (rank 0 owns 0 and 1, rank 1 owns 2 and 3), K = 2, topk_idx
[[0, 2], [1, 0], [3, -1], [2, 3]]. Rank 0 gets tokens 0, 1; rank 1 gets tokens 0, 2, 3: `send_token` is
[0, 1, 0, 2, 3] and `send_counts` [2, 3]. On rank 0 the local ids of its two rows are [[0, -1], [1, 0]]; expert_major
has three rows: expert 0 from rows 0 and 1, expert 1 from row 1, so `row_pair` (row * K + slot) is [0, 3, 2].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep.placement import ExpertPlacement


def find_bad_id(topk_idx_TK: Tensor, num_experts: int) -> tuple[int, int, int] | None:
    """(token, slot, id) of the first id outside [-1, num_experts), or None. The host waits for the answer."""
    bad_TK = (topk_idx_TK < -1) | (topk_idx_TK >= num_experts)
    if not bool(bad_TK.any()):
        return None
    token, slot = (int(i) for i in bad_TK.nonzero()[0])
    return token, slot, int(topk_idx_TK[token, slot])


def routing_fingerprint(topk_idx_TK: Tensor) -> int:
    """A 62-bit number that tells the ids of one dispatch from those of another."""
    flat = topk_idx_TK.reshape(-1).long() + 2
    place = torch.arange(1, flat.numel() + 1, device=flat.device) * 0x5851F42D4C957F2D  # wraps around, on purpose
    mixed = (flat + place) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 29)) * 0x369DEA0F31A53F85
    mixed = mixed ^ (mixed >> 32)
    return (int(mixed.sum()) + flat.numel()) & (2**62 - 1)


@dataclass(frozen=True, eq=False)
class SendLayout:
    """The source's side of a dispatch.

    Attributes:
        slot_rank: [T, K] int64, rank of the expert in each slot, -1 for none.
        slot_local: [T, K] int64, local id of the expert on that rank, -1 for none.
        send_token: [S_send] int64, source token of every row to send, ascending in (rank, token).
        send_counts: W row counts, by destination.
    """

    slot_rank: Tensor
    slot_local: Tensor
    send_token: Tensor
    send_counts: tuple[int, ...]


def send_layout(topk_idx_TK: Tensor, placement: ExpertPlacement) -> SendLayout:
    """Works out which tokens go to which rank. Ids must lie in [-1, E)."""
    owner_E, local_E = placement.tables(topk_idx_TK.device)
    ids_TK = topk_idx_TK.long()
    slot_rank, slot_local = owner_E[ids_TK], local_E[ids_TK]
    ranks_W = torch.arange(placement.world_size, device=topk_idx_TK.device)
    goes_WT = torch.stack([(slot_rank == rank).any(dim=1) for rank in ranks_W])
    send_token = goes_WT.nonzero()[:, 1].clone()
    return SendLayout(slot_rank, slot_local, send_token, tuple(goes_WT.sum(dim=1).tolist()))


def rows_for_peers(layout: SendLayout, weights_TK: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Ids and weights as the destinations see them: local ids or -1, and 0 for slots that are not theirs.

    Returns:
        ids [S_send, K] int64 and weights [S_send, K] (or None), in the order of `send_token`.
    """
    counts = torch.tensor(layout.send_counts, device=layout.send_token.device)
    rank_S = torch.repeat_interleave(counts, output_size=layout.send_token.numel())
    mine_SK = layout.slot_rank.index_select(0, layout.send_token) == rank_S.unsqueeze(1)
    ids_SK = layout.slot_local.index_select(0, layout.send_token).masked_fill_(~mine_SK, -1)
    if weights_TK is None:
        return ids_SK, None
    return ids_SK, weights_TK.index_select(0, layout.send_token).masked_fill_(~mine_SK, 0)


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """The destination's side: from compact rows to rows grouped by expert.

    Attributes:
        row_pair: [R] int64, `compact row * K + slot` of every row, -1 for padding.
        real_counts: [L] int64, rows of each local expert without padding.
        padded_counts: [L] int64, with padding.
    """

    row_pair: Tensor
    real_counts: Tensor
    padded_counts: Tensor


def expert_layout(local_idx_SK: Tensor, num_local_experts: int, alignment: int) -> ExpertLayout:
    """Groups the (row, slot) pairs in ascending (local expert, row, slot), each expert's padded to `alignment`."""
    flat = local_idx_SK.reshape(-1).long()
    pair = (flat >= 0).nonzero()[:, 0]
    expert = flat[pair]
    real = torch.bincount(expert, minlength=num_local_experts)
    padded = (real + alignment - 1) // alignment * alignment
    order = torch.argsort(expert, stable=True)
    if alignment == 1:
        return ExpertLayout(pair[order], real, padded)
    # A group's rows move down by the padding of the groups before it.
    shift = torch.cumsum(padded - real, 0) - (padded - real)
    place = torch.arange(pair.numel(), device=pair.device) + shift[expert[order]]
    row_pair = pair.new_full((int(padded.sum()),), -1).index_copy_(0, place, pair[order])
    return ExpertLayout(row_pair, real, padded)
