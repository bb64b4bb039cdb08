"""What a dispatch leaves behind for its combine and its backward.

A handle is an immutable record of tensors and ints. It holds no pointer, no buffer and no group, so it may outlive
the buffer that made it, and it fits every buffer over the same ranks and geometry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from moe_ep.deep_ep_v1.handle_tuple import v1_tuple
from moe_ep.ordered_sum import OrderedSum

Layout = Literal["compact", "expert_major"]
LAYOUTS: tuple[Layout, ...] = ("compact", "expert_major")


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """The routing of one dispatch, as one rank sees it.

    T tokens of this rank, K slots a token, S compact rows received (one per token and source rank), R rows handed out.

    Attributes:
        ranks: global ranks of the EP group; a buffer over other ranks refuses the handle.
        rank: this rank's place in the group.
        uid: fingerprint of the routing of all ranks; ranks that combine different dispatches find out by it.
        placement: fingerprint of the expert placement.
        layout: "compact" (R = S) or "expert_major".
        num_tokens, num_topk, num_experts, num_rows: T, K, E, R.
        alignment: rows of an expert are padded to a multiple of it.
        x_needs_grad, weights_need_grad: whether any rank wants that gradient, so that all join its backward.
        overflowed: `max_rows` was too small here; the float outputs are NaN.
        send_counts, recv_counts: compact rows to and from each rank.
        recv_pairs: (row, slot) pairs for local experts from each rank.
        rank_tokens: T of every rank.
        rank_rows: W * W numbers, the compact rows from rank i to rank j at [i * W + j].
        num_channels: into how many ranges DeepEP V1's tuple divides the tokens; nothing else depends on it.
        slot_rank: [T, K] int64, rank of the expert in each slot of this rank's tokens, -1 for none.
        send_token: [S_send] int64, source token of the rows sent, ascending in (rank, token).
        recv_token: [S] int32, source token of the compact rows received, ascending in (rank, token).
        row_pair: [R] int64, expert_major only: `compact row * K + slot` of a row, -1 for padding; empty if compact.
        geometry, token_row, pair_row: the same routing as the kernels read it, int32; empty where no kernel made the
            plan (`moe_ep.backends.kernel_view`). geometry: counts of all ranks (csrc/exchange/exchange.h). token_row:
            [T, W], compact row of a token on each rank, -1 for none. pair_row: [S, K], expert_major only, the row of
            each (compact row, slot), -1 for none.

    The plan of a kernel call with `max_rows` is known on the device only: its send_counts, recv_counts, recv_pairs,
    rank_tokens and rank_rows hold -1, send_token is empty, and recv_token and pair_row have room for `max_rows` rows.
    """

    ranks: tuple[int, ...]
    rank: int
    uid: int
    placement: int
    layout: Layout
    num_tokens: int
    num_topk: int
    num_experts: int
    num_rows: int
    alignment: int
    x_needs_grad: bool
    weights_need_grad: bool
    overflowed: bool
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    recv_pairs: tuple[int, ...]
    rank_tokens: tuple[int, ...]
    rank_rows: tuple[int, ...]
    num_channels: int
    slot_rank: Tensor
    send_token: Tensor
    recv_token: Tensor
    row_pair: Tensor
    geometry: Tensor
    token_row: Tensor
    pair_row: Tensor

    @property
    def num_compact_rows(self) -> int:
        """S: one row per (token, source rank) received here."""
        return sum(self.recv_counts)

    @property
    def is_known(self) -> bool:
        """Whether the host knows the counts."""
        return self.recv_counts[0] >= 0

    @cached_property
    def real_rows(self) -> Tensor:
        """[P] int64, the rows that are not padding, ascending. expert_major only."""
        return (self.row_pair >= 0).nonzero()[:, 0]

    @cached_property
    def local_sum(self) -> OrderedSum:
        """Sums the rows of each compact row in slot order: R rows -> S. expert_major only."""
        pair, by_pair = torch.sort(self.row_pair[self.real_rows])
        compact_row = torch.div(pair, self.num_topk, rounding_mode="floor")
        return OrderedSum.from_terms(compact_row, self.real_rows[by_pair], self.num_compact_rows)

    @cached_property
    def home_sum(self) -> OrderedSum:
        """Sums what came back for each token in ascending rank order: S_send rows -> T."""
        src = torch.arange(self.send_token.numel(), device=self.send_token.device)
        return OrderedSum.from_terms(self.send_token, src, self.num_tokens)

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """What a backend has worked out of the handle, by the backend's name: once, and kept as long as the handle."""
        return {}

    def __copy__(self) -> DispatchHandle:
        """With the same tensors: what is worked out of these is shared, now and later."""
        copied = replace(self)
        copied.__dict__["prepared"] = self.prepared
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Deep and pickled copies have tensors of their own: what was worked out of these stays here."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    # -- as DeepEP V1's tuple ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.v1_tuple)

    def __getitem__(self, place: int) -> Tensor:
        return self.v1_tuple[place]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.v1_tuple)

    @cached_property
    def v1_tuple(self) -> tuple[Tensor, ...]:
        """What DeepEP V1's intranode handle holds; see `moe_ep.deep_ep_v1.handle_tuple`."""
        return v1_tuple(self)

    # -- tensors only, for custom ops -------------------------------------------------------------------------------

    def pack(self) -> tuple[Tensor, ...]:
        """The handle as `NUM_HANDLE_TENSORS` tensors: host numbers (int64, CPU), then its own."""
        numbers = [len(self.ranks), *(int(getattr(self, name)) for name in _INTS), LAYOUTS.index(self.layout)]
        for name in _TUPLES:
            numbers += getattr(self, name)
        return torch.tensor(numbers, dtype=torch.int64), *(getattr(self, name) for name in _TENSORS)

    @classmethod
    def unpack(cls, tensors: Sequence[Tensor]) -> DispatchHandle:
        """The inverse of `pack`."""
        world, *numbers = (int(n) for n in tensors[0].tolist())
        values: dict[str, Any] = {}
        for name, is_bool in _INTS.items():
            values[name] = bool(numbers.pop(0)) if is_bool else numbers.pop(0)
        values["layout"] = LAYOUTS[numbers.pop(0)]
        for name, power in _TUPLES.items():
            values[name], numbers = tuple(numbers[: world**power]), numbers[world**power :]
        values |= dict(zip(_TENSORS, tensors[1:], strict=True))
        return cls(**values)


# The parts of a handle: numbers (and whether they are truth values), tuples of W or W * W numbers, tensors.
_INTS = {
    "rank": False,
    "uid": False,
    "placement": False,
    "num_tokens": False,
    "num_topk": False,
    "num_experts": False,
    "num_rows": False,
    "alignment": False,
    "num_channels": False,
    "x_needs_grad": True,
    "weights_need_grad": True,
    "overflowed": True,
}
_TUPLES = {"ranks": 1, "send_counts": 1, "recv_counts": 1, "recv_pairs": 1, "rank_tokens": 1, "rank_rows": 2}
_TENSORS = ("slot_rank", "send_token", "recv_token", "row_pair", "geometry", "token_row", "pair_row")
NUM_HANDLE_TENSORS = 1 + len(_TENSORS)


def num_handle_numbers(world_size: int) -> int:
    """Entries of the first tensor of `DispatchHandle.pack`."""
    per_rank = sum(1 if power == 1 else world_size for power in _TUPLES.values())
    return 2 + len(_INTS) + per_rank * world_size


@dataclass(frozen=True, eq=False)
class PackedHandle:
    """A `DispatchHandle` as its tensors: what dispatch returns inside a compiled graph."""

    tensors: tuple[Tensor, ...]

    def unpack(self) -> DispatchHandle:
        return DispatchHandle.unpack(self.tensors)


@dataclass(frozen=True, eq=False)
class DispatchOutput:
    """What `moe_ep.dispatch` returns.

    Attributes:
        x: [R, H] received rows, dtype of the input. compact: one row per (token, rank), ascending in (source rank,
            source token). expert_major: one row per (token, expert), ascending in (local expert, source rank, source
            token), every expert's rows padded with zeros to a multiple of `alignment`.
        topk_idx: local expert ids, -1 for "not here" and for padding; [R, K] if compact, [R] if expert_major; the
            dtype of the input ids.
        topk_weights: the weights beside them, 0 where the id is -1; None if no weights were given.
        tokens_per_expert: L ints, the split sizes of `x` in expert_major, padding included (compact: local slots,
            rounded up to `alignment`). None with `max_rows`.
        real_tokens_per_expert: L ints without padding. None with `max_rows`.
        expert_counts: [L] int32 on the device, rows without padding.
        expert_offsets: [L + 1] int32 on the device, where each expert's padded rows begin, and their sum.
        handle: what `moe_ep.combine` needs.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    tokens_per_expert: list[int] | None
    real_tokens_per_expert: list[int] | None
    expert_counts: Tensor
    expert_offsets: Tensor
    handle: DispatchHandle | PackedHandle
