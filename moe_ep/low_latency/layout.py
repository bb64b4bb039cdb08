"""Where the rows of a low-latency dispatch lie: fixed slots, packed by expert. Tensors and ints, no exchange.

T tokens of this rank, H hidden, K slots a token, E experts, L of them local, W ranks, R rows received, B = H / 128
scales a row. M is `num_max_dispatch_tokens_per_rank`; every local expert has N = W * M places, which hold its rows from
place 0 on in ascending (source rank, source token, slot).

Example: W = 2, M = 2, E = 2, K = 1. Rank 0 sends its tokens 0 and 1 to expert 1, rank 1 its token 1 to expert 1. On
rank 1, which owns expert 1, the N = 4 places hold (rank 0, token 0), (rank 0, token 1), (rank 1, token 1), nothing:
`src_info` is [[0, 1, 1, -1]], and `layout_range` says [[count 2 from 0, count 1 from 2]].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_ep.fp8 import UNIT_SCALE, quantize_1x128
from moe_ep.handle import DispatchHandle
from moe_ep.placement import ExpertPlacement

# What travels. All ranks of a call must choose the same one.
FORMATS = ("rows as given", "FP8", "FP8 with power-of-two scales", "FP8 with UE8M0 scales")
AS_GIVEN, FP8, FP8_ROUNDED, FP8_UE8M0 = range(4)
UE8M0_PER_WORD = 4


@dataclass(frozen=True)
class CallShape:
    """What must be alike on all ranks of a call.

    Attributes:
        hidden, num_topk, num_max: H, K, M.
        row_format: index in `FORMATS`.
        dtype: of the rows that are sent.
        placement: owner of every expert.
    """

    hidden: int
    num_topk: int
    num_max: int
    row_format: int
    dtype: torch.dtype
    placement: ExpertPlacement = field(hash=False)  # compared, but it takes long to hash

    @property
    def home_dtype(self) -> torch.dtype:
        """Of the rows that come back."""
        return self.dtype if self.row_format == AS_GIVEN else torch.bfloat16

    @property
    def num_scale_words(self) -> int:
        """Scales of a row, or int32 with four of them."""
        if self.row_format == AS_GIVEN:
            return 0
        return self.hidden // 128 // (UE8M0_PER_WORD if self.row_format == FP8_UE8M0 else 1)


@dataclass(frozen=True, eq=False)
class NodeRouting:
    """The routing of a dispatch that kernels made; known on the device only.

    Attributes:
        ranks, rank: global ranks of the EP group, this rank's place in it.
        shape: of the call.
        num_tokens: T.
        row_places: [1 + W * M * K, 2] int32. First R; then, of each row, `local expert * N + place`, and the rank and
            slot that it came from as `rank * M * K + token * K + slot`.
        slot_rank: [T, K] int32, rank of the expert in each slot; -1 for none, -2 where the expert had M rows already.
    """

    ranks: tuple[int, ...]
    rank: int
    shape: CallShape
    num_tokens: int
    row_places: Tensor
    slot_rank: Tensor

    @property
    def placement(self) -> int:
        """Fingerprint of the expert placement."""
        return self.shape.placement.fingerprint

    @property
    def num_experts(self) -> int:
        return self.shape.placement.num_experts


@dataclass(frozen=True, eq=False)
class LowLatencyHandle:
    """What `low_latency_dispatch` leaves behind for `low_latency_combine`.

    Indexed or unpacked it is DeepEP V1's tuple of five: src_info, layout_range, M, H, E. Valid once the dispatch's hook
    has run, if it has one.

    Attributes:
        src_info: [L, N] int32, source token of the row in each place, -1 where there is none.
        layout_range: [L, W] int64, the rows from each rank: their count in the low 32 bits, the place of the first in
            the high 32 bits.
        num_max_dispatch_tokens_per_rank, hidden, num_experts: M, H, E.
        routing: the dispatch in the words of every other exchange, its R rows are those in the places, in order; or
            what the kernels know of it.
        row_slot: [R] int64, `local expert * N + place` of each row; empty where kernels made the handle.
        topk_idx: [T, K], a copy of the ids; where kernels made the handle, the ids themselves.
        dtype: of the rows that come back: bfloat16 after FP8, that of the input otherwise.
    """

    src_info: Tensor
    layout_range: Tensor
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    routing: DispatchHandle | NodeRouting
    row_slot: Tensor
    topk_idx: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, N, H), the shape of what dispatch gives and combine takes."""
        return self.src_info.shape[0], self.src_info.shape[1], self.hidden

    def _v1_tuple(self) -> tuple[Tensor, Tensor, int, int, int]:
        return self.src_info, self.layout_range, self.num_max_dispatch_tokens_per_rank, self.hidden, self.num_experts

    def __len__(self) -> int:
        return len(self._v1_tuple())

    def __getitem__(self, place: int) -> Tensor | int:
        return self._v1_tuple()[place]

    def __iter__(self) -> Iterator[Tensor | int]:
        return iter(self._v1_tuple())


@dataclass(frozen=True, eq=False)
class Places:
    """Where R rows go; the attributes are those of `LowLatencyHandle`."""

    row_slot: Tensor
    src_info: Tensor
    layout_range: Tensor


def places_of(routing: DispatchHandle, row_expert_R: Tensor, num_rows_L: Tensor, num_places: int) -> Places:
    """Packs the rows of each expert from place 0 on.

    Args:
        routing: layout "expert_major" without padding.
        row_expert_R: [R] local expert of each row, ascending.
        num_rows_L: [L] rows of each local expert, at most `num_places`.
        num_places: N.
    """
    world, device = len(routing.ranks), routing.row_pair.device
    num_local, expert_R, count_L = num_rows_L.numel(), row_expert_R.long(), num_rows_L.long()
    first_L = torch.cumsum(count_L, 0) - count_L
    row_slot = expert_R * num_places + torch.arange(expert_R.numel(), device=device) - first_L[expert_R]

    compact_R = torch.div(routing.row_pair, routing.num_topk, rounding_mode="floor")
    src_info = torch.full((num_local * num_places,), -1, dtype=torch.int32, device=device)
    src_info[row_slot] = routing.recv_token[compact_R]

    source_R = _peer_of_rows(routing.recv_counts, device)[compact_R]
    count_LW = torch.bincount(expert_R * world + source_R, minlength=num_local * world).view(num_local, world)
    begin_LW = torch.cumsum(count_LW, 1) - count_LW
    return Places(row_slot, src_info.view(num_local, num_places), (begin_LW << 32) | count_LW)


def put_rows(out_LNX: Tensor, row_slot: Tensor, rows_RX: Tensor) -> None:
    """Writes rows into their places of `out`, whatever its strides; FP8 rows come as `encode` made them."""
    num_places = max(1, out_LNX.shape[1])
    if rows_RX.dtype == torch.uint8:
        out_LNX = out_LNX.view(torch.uint8)
    out_LNX[torch.div(row_slot, num_places, rounding_mode="floor"), row_slot % num_places] = rows_RX


def encode(x_TH: Tensor, row_format: int) -> tuple[Tensor, Tensor | None]:
    """The rows as they travel, and the scales beside them: [T, B] float32, or [T, B / 4] int32 with UE8M0.

    FP8 rows travel as uint8: PyTorch cannot index their own dtype everywhere.
    """
    if row_format == AS_GIVEN:
        return x_TH, None
    x_fp8_TH, scales_TB = quantize_1x128(x_TH, power_of_two=row_format != FP8)
    return x_fp8_TH.view(torch.uint8), pack_ue8m0(scales_TB) if row_format == FP8_UE8M0 else scales_TB


def pack_ue8m0(scales_TB: Tensor) -> Tensor:
    """Powers of two as their exponent bytes (the float32 exponent field, 2^(byte - 127)), four to an int32.

    The first scale of four lies in the lowest byte. B must be a multiple of 4, the scales normal numbers.

    Example: the scales 1, 2, 4 and 0.5 have the bytes 127, 128, 129 and 126: 0x7E81807F.
    """
    exponents_TB = (scales_TB.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return exponents_TB.view(torch.int32)


def empty_scales(num_local: int, num_places: int, hidden: int, row_format: int, device: torch.device) -> Tensor:
    """Scales 1 as [L, N, B] float32 or [L, N, B / 4] int32, in which the places of an expert are contiguous."""
    ue8m0 = row_format == FP8_UE8M0
    num_scales = hidden // 128 // (UE8M0_PER_WORD if ue8m0 else 1)
    dtype = torch.int32 if ue8m0 else torch.float32
    scales_LBN = torch.full((num_local, num_scales, num_places), UNIT_SCALE[dtype], dtype=dtype, device=device)
    return scales_LBN.transpose(1, 2)


def without_ranks(routing: DispatchHandle, closed: Collection[int]) -> DispatchHandle:
    """The same dispatch without the rows to and from some ranks: here they become padding, at home unused slots."""
    if not closed:
        return routing

    def opened(counts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(0 if rank in closed else num for rank, num in enumerate(counts))

    ranks = torch.tensor(sorted(closed), device=routing.row_pair.device)
    is_sent = ~torch.isin(_peer_of_rows(routing.send_counts, ranks.device), ranks)
    is_received = ~torch.isin(_peer_of_rows(routing.recv_counts, ranks.device), ranks)
    compact_R = torch.div(routing.row_pair, routing.num_topk, rounding_mode="floor").clamp(min=0)
    kept_before = torch.cumsum(is_received, 0) - is_received.long()
    pair_R = kept_before[compact_R] * routing.num_topk + torch.remainder(routing.row_pair, routing.num_topk)
    return replace(
        routing,
        send_counts=opened(routing.send_counts),
        recv_counts=opened(routing.recv_counts),
        recv_pairs=opened(routing.recv_pairs),
        slot_rank=routing.slot_rank.masked_fill(torch.isin(routing.slot_rank, ranks), -1),
        send_token=routing.send_token[is_sent],
        recv_token=routing.recv_token[is_received],
        row_pair=torch.where((routing.row_pair >= 0) & is_received[compact_R], pair_R, -1),
    )


def _peer_of_rows(num_rows: tuple[int, ...], device: torch.device) -> Tensor:
    """[S] int64, the rank that each of the rows comes from."""
    return torch.repeat_interleave(torch.tensor(num_rows, device=device))
