"""The low-latency kernels of a `FakeNode`: they move rows between the threads that stand for ranks, on the CPU.

What csrc/low_latency/low_latency.h promises, by the plainest means: a call leaves what it sends under its number and
waits for what the others leave. They complain where a call writes into a place that a peer still reads.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_ep.fp8 import quantize_1x128
from moe_ep.low_latency.layout import AS_GIVEN, FP8, FP8_UE8M0, pack_ue8m0
from tests.helpers.fake_exchange import FakeExchange, FakeKernels, FakeNode

LIMIT_SECS = 20.0
Key = tuple[int, int]  # generation, epoch


def at(address: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """The tensor that lies at an address of this process."""
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=dtype).view(shape)


class LowLatencyNode(FakeNode):
    """A node whose kernels serve the low-latency calls too.

    Attributes:
        sent: by call, what each rank left.
        read: by call, the ranks that have read it.
    """

    def __init__(self, size: int = 1) -> None:
        super().__init__(size)
        self.sent: defaultdict[Key, dict[int, SimpleNamespace]] = defaultdict(dict)
        self.read: defaultdict[Key, set[int]] = defaultdict(set)
        self.num_sent = 0
        self.kernels_of = {rank: LowLatencyFakeKernels(self, rank) for rank in range(size)}


class LowLatencyFakeKernels(FakeKernels):
    low_latency_max_ranks = 128
    low_latency_max_pairs = (1 << 20) - 1
    low_latency_max_scales = 1024
    low_latency_max_counts = 4096

    def LowLatency(self, exchange: FakeExchange) -> FakeLowLatency:  # noqa: N802 (a class)
        return FakeLowLatency(exchange)

    LowLatencyShape = LowLatencyDispatch = LowLatencyCombine = LowLatencyLaunch = staticmethod(SimpleNamespace)

    def low_latency_row_bytes(self, num_bytes: int) -> int:
        return -(-num_bytes // 128) * 128

    def low_latency_needs(self, size: int, shape: Any, combined: Any, dtype: str) -> tuple[int, int]:
        pairs = shape.max_tokens * shape.num_topk
        return size * (shape.most_local + pairs), max(size * pairs * shape.row_bytes, pairs * combined.row_bytes)

    def num_sms(self) -> int:
        return 132


class FakeLowLatency:
    """One rank's memory and kernels; `launches` holds (name, launch) of each."""

    def __init__(self, exchange: FakeExchange) -> None:
        self.node, self.rank, self.size = exchange.node, exchange.rank, exchange.size
        self.words_a_slot = self.bytes_a_slot = 0
        self.generation = self.epoch = 0
        self.launches: list[tuple[str, Any]] = []
        self._num_allocated = 0
        self._cleared = 0  # what was sent before is forgotten here

    def allocate(self, words_a_slot: int, bytes_a_slot: int) -> None:
        with self.node.change:
            assert not self.node.opened[self.export_own()], f"rank {self.rank} frees memory that a peer has open"
        self._num_allocated += 1
        self.words_a_slot, self.bytes_a_slot = words_a_slot, bytes_a_slot

    def export_own(self) -> bytes:
        return f"lowlatency {self.rank}.{self._num_allocated}".encode()

    def open(self, peer: int, exported: bytes) -> None:
        assert exported.decode().split(" ")[1].split(".")[0] == str(peer)
        with self.node.change:
            self.node.opened[exported].add(self.rank)

    def close(self) -> None:
        with self.node.change:
            for name, ranks in self.node.opened.items():
                if name.startswith(b"lowlatency"):
                    ranks.discard(self.rank)

    def clear(self) -> None:
        with self.node.change:
            self._cleared = self.node.num_sent

    def begin(self, generation: int) -> None:
        """A word has 12 bits for it."""
        self.generation, self.epoch = generation % 4096, 0
        for key in [key for key in self.node.read if key[0] == self.generation]:
            self.node.read[key].discard(self.rank)

    # -- kernels ----------------------------------------------------------------------------------------------------

    def dispatch(self, launch: Any, operation: int, given: Any) -> None:
        shape, num_tokens = given.shape, given.num_tokens
        x_dtype = {2: torch.bfloat16, 4: torch.float32}[given.elem_bytes]
        id_dtype = torch.int64 if given.id_bytes == 8 else torch.int32
        x = at(given.x, x_dtype, num_tokens, shape.hidden).clone()
        ids = at(given.ids, id_dtype, num_tokens, shape.num_topk).clone()
        key = self._send("dispatch", launch, x=x, ids=ids)
        mask, owner = at(launch.mask, torch.int32, self.size), at(given.owner, torch.int32, shape.num_experts)
        if launch.sends:
            slots = torch.where(ids >= 0, owner[ids.clamp(min=0).long()], -1)
            closed = torch.tensor([rank for rank in range(self.size) if mask[rank]], dtype=torch.int32)
            at(given.slot_rank, torch.int32, *ids.shape).copy_(slots.masked_fill(torch.isin(slots, closed), -1))
        if launch.receives:
            self._receive_rows(launch, given, self._receive(key, launch), owner)

    def _receive_rows(self, launch: Any, given: Any, of_ranks: dict[int, Any], owner: Tensor) -> None:
        shape, num_local = given.shape, given.num_local
        num_places = self.size * shape.max_tokens
        local = at(given.local_idx, torch.int32, shape.num_experts)
        is_fp8 = given.format != AS_GIVEN
        src_info = at(given.src_info, torch.int32, num_local, num_places).fill_(-1)
        count = at(given.recv_count, torch.int32, num_local).zero_()
        ranges = at(given.layout_range, torch.int64, num_local, self.size).zero_()
        most = 1 + num_places * shape.num_topk
        places, num_rows = at(given.row_places, torch.int32, most, 2), 0
        for expert in [e for e in range(shape.num_experts) if owner[e] == self.rank]:
            here = int(local[expert])
            for source in range(self.size):
                message = of_ranks.get(source)
                named = [] if message is None else (message.ids.flatten() == expert).nonzero().flatten().tolist()
                pairs = named[: shape.max_tokens]
                ranges[here, source] = int(count[here]) << 32 | len(pairs)
                for pair in pairs if message is not None else ():
                    place, token = int(count[here]), pair // shape.num_topk
                    self._put_row(given, message.x[token : token + 1], here, place, num_places, is_fp8)
                    src_info[here, place] = token
                    home = source * shape.max_tokens * shape.num_topk + pair
                    num_rows += 1
                    places[num_rows] = torch.tensor([here * num_places + place, home])
                    count[here] += 1
        places[0, 0] = num_rows
        if given.cumulative:
            at(given.cumulative, torch.int32, num_local).add_(count)
        if launch.stats:
            at(launch.stats, torch.int64, self.size).add_(1)

    def _put_row(self, given: Any, row: Tensor, expert: int, place: int, num_places: int, is_fp8: bool) -> None:
        hidden = given.shape.hidden
        if not is_fp8:
            at(given.rows, row.dtype, given.num_local, num_places, hidden)[expert, place] = row[0]
            return
        codes, scales = quantize_1x128(row, power_of_two=given.format != FP8)
        at(given.rows, torch.uint8, given.num_local, num_places, hidden)[expert, place] = codes.view(torch.uint8)[0]
        words = pack_ue8m0(scales) if given.format == FP8_UE8M0 else scales
        at(given.scales, words.dtype, given.num_local, words.shape[1], num_places)[expert, :, place] = words[0]

    def combine(self, launch: Any, operation: int, given: Any, dtype: str) -> None:
        shape, row_dtype = given.shape, getattr(torch, dtype)
        pairs_a_rank = shape.max_tokens * shape.num_topk
        rows = {}
        if launch.sends:
            places = at(given.row_places, torch.int32, 1 + self.size * pairs_a_rank, 2)
            for row in range(1, 1 + int(places[0, 0])):
                place, home = places[row].tolist()
                address = given.rows + place * shape.hidden * row_dtype.itemsize
                rows[divmod(home, pairs_a_rank)] = at(address, row_dtype, shape.hidden).clone()
        key = self._send("combine", launch, rows=rows)
        if not launch.receives:
            return
        of_ranks = self._receive(key, launch)
        slot_rank = at(given.slot_rank, torch.int32, given.num_tokens, shape.num_topk)
        weights = at(given.weights, torch.float32, given.num_tokens, shape.num_topk)
        out = at(given.out, row_dtype, given.num_tokens, shape.hidden)
        for token in range(given.num_tokens):
            terms = [
                of_ranks[owner].rows[self.rank, token * shape.num_topk + slot].float() * weights[token, slot]
                for slot, owner in enumerate(slot_rank[token].tolist())
                if owner in of_ranks
            ]
            total = torch.zeros(shape.hidden) if not terms else terms[0]
            for term in terms[1:]:
                total = total + term
            out[token] = total.to(row_dtype)

    def refuse(self, launch: Any, operation: int) -> None:
        self.node.read[self._send("refuse", launch, rows={})].add(self.rank)

    def drain(self, launch: Any) -> None:
        self.launches.append(("drain", launch))

    # -- the protocol -----------------------------------------------------------------------------------------------

    def _send(self, name: str, launch: Any, **sent: Any) -> Key:
        self.launches.append((name, launch))
        if not launch.sends:
            return self.generation, int(at(launch.ticket, torch.int64, 1))
        key = (self.generation, self.epoch)
        self.epoch += 1
        if launch.ticket:
            at(launch.ticket, torch.int64, 1).fill_(key[1])
        earlier = self.node.read[self.generation, key[1] - 2]
        with self.node.change:
            free = key[1] < 2 or self.node.change.wait_for(lambda: len(earlier) == self.size, LIMIT_SECS)
            assert free, f"{name} of rank {self.rank} writes where a peer still reads"
            mask = at(launch.mask, torch.int32, self.size).tolist()
            self.node.num_sent += 1
            sent |= {"number": self.node.num_sent}
            self.node.sent[key][self.rank] = SimpleNamespace(print=launch.print, mask=mask, name=name, **sent)
            self.node.change.notify_all()
        return key

    def _receive(self, key: Key, launch: Any) -> dict[int, Any]:
        """What the ranks have left with which this one exchanges rows."""
        here = self.node.sent[key]

        def are_there() -> bool:
            return sum(of.number > self._cleared for of in here.values()) == self.size

        with self.node.change:
            assert self.node.change.wait_for(are_there, LIMIT_SECS), "a rank did not send"
            sent = dict(here)
            self.node.read[key].add(self.rank)
            self.node.change.notify_all()
        mask = at(launch.mask, torch.int32, self.size).tolist()
        open_ranks = {rank: of for rank, of in sent.items() if not mask[rank] and not of.mask[self.rank]}
        prints = {of.print for of in open_ranks.values()}
        if len(prints) > 1 or any(of.name == "refuse" for of in open_ranks.values()):
            self.node.exchanges[self.rank].faults.append(("low_latency", [1, 6, 0, 0, 0, 0, 0, 0]))
            return {}
        return open_ranks
