"""The kernels between nodes played on the CPU: they move rows, as csrc says, between processes that share a gloo group.

What a kernel gets as addresses are addresses of CPU memory here, and what it would read of another rank travels with
`all_gather_object`: so every rank of the group makes the same calls. Streams are none: everything happens at once,
which the order of launches on the streams must allow.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep._native.exchange import Answer
from moe_ep.backends import internode_choice, internode_kernels, node_calls, node_memory
from moe_ep.backends.device_faults import DISAGREE, GO, GROW, REFUSE
from moe_ep.backends.node_calls import NodeCalls
from moe_ep.backends.node_header import (
    DIFFERS_ELSEWHERE,
    ELSEWHERE_FIELD_SHIFT,
    ELSEWHERE_VALUE_WORD,
    ELSEWHERE_WORD,
    NEED_WORD,
    OPENING_WORD,
    STATUS_WORD,
)
from moe_ep.ordered_sum import accumulation_dtype
from tests.helpers.fake_exchange import KernelSizes
from tests.helpers.played_memory import NAMES, fill_rows, memory_at, numbers_at, ordered_sum, pattern_of, rows_at

SIGNAL_BYTES = 512  # of a block, before its slots
PAGE_BYTES = 4096


class PlayedKernels(KernelSizes):
    """`moe_ep._C` as far as backend `internode` needs it.

    Attributes:
        crossed: (rows, bytes) that this rank has put to other nodes.
        num_in_place: moves whose peers read in place.
    """

    max_ranks, max_chunks, max_local_experts, max_nodes = 16, 64, 2048, 256
    low_latency_max_ranks = 128

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int) -> None:
        self.group, self.ranks_per_node = group, ranks_per_node
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.crossed = [0, 0]
        self.num_in_place = 0
        self.exchanges: dict[int, PlayedExchange] = {}  # by the address of their state

    def everybody(self, thing: object) -> list[Any]:
        things: list[Any] = [None] * self.world
        dist.all_gather_object(things, thing, group=self.group)
        return things

    def node(self, thing: object) -> list[Any]:
        """What the ranks of this node say, in order; all nodes do so at once."""
        first = self.rank // self.ranks_per_node * self.ranks_per_node
        return self.everybody(thing)[first : first + self.ranks_per_node]

    def Exchange(self, **arguments: Any) -> PlayedExchange:  # noqa: N802 (a class)
        return PlayedExchange(self, **arguments)

    def IpcRail(self, **arguments: Any) -> PlayedRail:  # noqa: N802 (a class)
        return PlayedRail(self, **arguments)

    def NvshmemRail(self, pes: Sequence[int], **arguments: Any) -> PlayedRail:  # noqa: N802 (a class)
        return PlayedRail(self, num_nodes=len(pes), **arguments)

    def Route(self, **arguments: Any) -> SimpleNamespace:  # noqa: N802 (a class)
        return SimpleNamespace(**arguments)

    def RailRound(self, **arguments: Any) -> SimpleNamespace:  # noqa: N802 (a class)
        return SimpleNamespace(**arguments)

    def pci_bus_id(self) -> str:
        return "0000:00:00.0"

    def can_reach(self, peer_pci_bus_id: str) -> bool:
        return True

    def node_sum(
        self, *, bias: tuple[int, int], place: int, dtype: str, y: int, own: int, own_by_place: bool, **given: Any
    ) -> None:
        """csrc/internode/node_sum.h."""
        row_bytes, num_nodes, kind = given["row_bytes"], given["num_nodes"], NAMES[dtype]
        if self.exchanges[given["state"]].refused:
            fill_rows(y + given["first_token"] * row_bytes, given["num_tokens"], row_bytes, given["poison"])
            return
        for token in range(given["first_token"], given["first_token"] + given["num_tokens"]):
            places = numbers_at(place + token * num_nodes * 4, num_nodes).tolist()
            at = [address + token * row_bytes for address in bias if address]
            for node, row in enumerate(places):
                if row >= 0:
                    inbox = given["inbox"] + node * given["flow_bytes"] + row * row_bytes
                    at.append(own + (row if own_by_place else token) * row_bytes if node == given["node"] else inbox)
            out = memory_at(y + token * row_bytes, row_bytes)
            terms = [memory_at(address, row_bytes).clone().view(kind) for address in at]
            out.copy_(ordered_sum(terms, kind).view(torch.uint8) if terms else torch.zeros_like(out))


class PlayedRail:
    """csrc/internode/rail.h. Inboxes hold NaN where nothing has come in, and slots are looked after."""

    def __init__(
        self, kernels: PlayedKernels, node: int, num_nodes: int, flow_bytes: int, node_state: int, **_: Any
    ) -> None:
        self.kernels, self.node, self.num_nodes, self.flow_bytes = kernels, node, num_nodes, flow_bytes
        self.block_bytes = SIGNAL_BYTES + 4 * num_nodes * flow_bytes
        self._memory = torch.full((self.block_bytes,), 0xFF, dtype=torch.uint8)
        self.block = self._memory.data_ptr()
        self._sent: dict[int, list[Tensor]] = {}
        self._is_full = [False, False]
        self._taken: set[int] = set()  # rounds of the call
        self._on_the_way: set[int] = set()  # rounds that this rank has put, as long as nothing says that they are there
        self.num_rounds = self.num_openings = 0
        self._exchange = kernels.exchanges[node_state]

    def inbox(self, slot: int) -> int:
        return SIGNAL_BYTES + slot * self.num_nodes * self.flow_bytes

    def outbox(self, slot: int) -> int:
        return self.inbox(2 + slot)

    def export_block(self) -> bytes:
        return b"rail"

    def open_block(self, node: int, exported: bytes) -> None:
        assert node != self.node

    def watch(self, **_: Any) -> None: ...

    def address_at(self, pe: int) -> int:
        return 0

    def begin_generation(self, generation: int) -> None:
        assert generation > 0
        assert not any(self.kernels.everybody(bool(self._on_the_way))), "puts will come into the new generation"
        self._sent.clear()
        self._taken.clear()
        self._is_full = [False, False]
        self.num_openings = 0

    def open(self, call: bytes, stream: int) -> None:
        header, num_match, _ = pickle.loads(call)
        self.num_openings += 1
        assert not self._taken, "a call is opened before the one before has ended"
        self._exchange.open_call(header, num_match, self.num_openings)

    def settle(self, stream: int) -> None:
        self._on_the_way.clear()

    def sent_bytes(self) -> int:
        return self.kernels.crossed[1]

    def send(self, round: Any, rows: Sequence[tuple[int, int, int]], token: int, num_sms: int, stream: int) -> None:
        if self._exchange.refused:
            return
        assert num_sms >= 1
        assert 0 < round.flow_bytes <= self.flow_bytes
        first = numbers_at(round.first_out, self.num_nodes * round.num_rounds + 1).tolist()
        outbox = self.block + self.outbox(round.number % 2)
        flows = []
        for node in range(self.num_nodes):
            begin, end = first[node * round.num_rounds + round.number :][:2]
            num_rows = end - begin if node != self.node else 0
            assert num_rows * round.row_bytes <= round.flow_bytes
            flow = rows_at(outbox + node * round.flow_bytes, num_rows, round.row_bytes, round.row_bytes)
            if token:
                tokens = numbers_at(token + 4 * begin, num_rows).tolist()
                for row, source in enumerate(tokens):
                    kinds = [memory_at(x + source * stride, num_bytes) for x, stride, num_bytes in rows]
                    flow[row] = torch.cat(kinds)
            flows.append(flow.clone())
            self.kernels.crossed[0] += num_rows
            self.kernels.crossed[1] += num_rows * round.row_bytes
        assert round.number not in self._sent
        self.wait_free(round, stream)
        self._sent[round.number] = flows
        self._on_the_way.add(round.number)

    def wait_free(self, round: Any, stream: int) -> None:
        if self._exchange.refused:
            return
        assert round.number not in self._sent
        assert round.number - 2 in {-2, -1, *self._taken}, "launched before what it waits for on the other ranks"

    def wait(self, round: Any, stream: int) -> None:
        slot = round.number % 2
        if self._exchange.refused:
            return
        assert not self._is_full[slot], "a slot is written over before it was taken"
        self._is_full[slot] = True
        world, size = self.kernels.everybody((round.number, self._sent.pop(round.number))), self.kernels.ranks_per_node
        self._on_the_way.discard(round.number)
        inbox = memory_at(self.block + self.inbox(slot), self.num_nodes * self.flow_bytes)
        inbox.fill_(0xFF)
        for node, (number, flows) in enumerate(world[self.kernels.rank % size :: size]):
            assert number == round.number
            num_in = numbers_at(round.num_in + 4 * (node * round.num_rounds + number), 1).item()
            if node != self.node:
                assert flows[self.node].shape[0] == num_in
                inbox[node * round.flow_bytes :][: flows[self.node].numel()] = flows[self.node].reshape(-1)

    def take(self, round: Any, stream: int) -> None:
        if self._exchange.refused:
            return
        self._is_full[round.number % 2] = False
        self._taken.add(round.number)
        if round.number == round.num_rounds - 1:
            assert not self._sent, "the rounds were counted on before all was sent"
            assert self.num_rounds % 2 == 0
            self.num_rounds += round.num_rounds
            self._taken.clear()


class PlayedExchange:
    """`moe_ep._native.exchange.NativeExchange` as far as the legs of a call between nodes need it."""

    def __init__(self, kernels: PlayedKernels, rank: int, size: int, timeout_secs: float) -> None:
        self.kernels, self.rank, self.size = kernels, rank, size
        self.slot_bytes = 0
        self.state_address = self.record_address = 8 * (1 + len(kernels.exchanges))
        kernels.exchanges[self.state_address] = self
        self.refused = False
        self._num_calls = self._num_refused = self._num_taken = 0
        self._kept: list[int] = []  # the first refusal that the host has not taken
        self._blocks: list[Sequence[int]] = []
        self._headers: list[tuple[int, ...]] = [(0,) * 32] * size
        self._verdict = GO

    def export_control(self) -> bytes:
        return b"control"

    export_segment = export_control

    def open_control(self, peer: int, exported: bytes) -> None: ...

    open_segment = open_control

    def open_block(self, peer: int, exported: bytes) -> None: ...

    def close_segments(self) -> None: ...

    def allocate_segment(self, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES

    def adopt_block(self, addresses: Sequence[int]) -> None:
        assert len(addresses) == self.size
        self._blocks.append(addresses)

    def begin_generation(self, generation: int) -> None:
        self.refused = False
        self._num_calls = self._num_refused = self._num_taken = 0
        self._kept = []

    def launch_on(self, stream: int, bulk_copies: bool) -> None: ...

    def has_fault(self) -> bool:
        return self._num_refused > self._num_taken

    def take_faults(self) -> list[Any]:
        num_new, kept = self._num_refused - self._num_taken, self._kept
        self._num_taken, self._kept = self._num_refused, []
        if kept:
            kept[2] = num_new - 1
            return [("refused", kept)]
        return [("refusals", [num_new])] if num_new else []

    def drain(self, header: bytes) -> None: ...

    def header_only(self, caller: int, joins: bool, header: bytes, num_match: int, question: int) -> bool:
        words = struct.unpack("32q", header)
        if words[OPENING_WORD]:
            self.open_call(header, num_match, 1)
        else:  # a question for room, which all ranks of the node ask alike
            assert not self.refused
            self._headers = [words] * self.size
            self._verdict = GROW if words[NEED_WORD] > self.slot_bytes else GO
        return torch.cuda.is_current_stream_capturing()

    def opening(self, header: bytes, num_match: int, question: int) -> bytes:
        return pickle.dumps((header, num_match, question))

    def open_call(self, header: bytes, num_match: int, number: int) -> None:
        """`moe_ep_rail_open` of csrc/internode/rail_kernels.cuh."""
        world, per_node = self.kernels.everybody(struct.unpack("32q", header)), self.kernels.ranks_per_node
        first = self.kernels.rank - self.rank
        rails = [world[rail::per_node] for rail in range(per_node)]
        self._headers = [told(rail, first // per_node, num_match, number) for rail in rails]
        self._verdict = verdict_of(self._headers, num_match)
        self.refused = self._verdict != GO
        if self.refused:
            self._num_refused += 1
            headers = [word for words in self._headers for word in words]
            self._kept = self._kept or [self._verdict, self._num_calls, 0, 0, 0, 0, 0, 0, *headers]
        self._num_calls += 1

    def wait_answer(self, question: int, limit_secs: float) -> Answer:
        return self.answer()

    def answer(self) -> Answer:
        return self._verdict, self._num_calls - 1, -1, 0, (0, 0, False, False, (), (), ())

    def headers(self, size: int) -> bytes:
        return b"".join(struct.pack("32q", *words) for words in self._headers)

    # -- rows -------------------------------------------------------------------------------------------------------

    def move(self, caller: int, joins: bool, num_sms: int, route: Any, operation: int, hidden: int, *rest: Any) -> bool:
        """csrc/intranode/move.h."""
        dtype_number, need_bytes, places, rows, dtype, weights, made_rows, grad_weights = rest
        if self.refused:
            for _, _, row_bytes, out_address, poison, _ in rows:
                fill_rows(out_address, route.num_rows, row_bytes, poison)
            if grad_weights:
                numbers_at(grad_weights, route.num_rows, accumulation_dtype(NAMES[dtype])).fill_(float("nan"))
            return torch.cuda.is_current_stream_capturing()
        assert num_sms >= 1
        assert need_bytes <= self.slot_bytes
        self._check_places(places, rows)
        self.kernels.num_in_place += bool(places)
        token_row = numbers_at(route.token_row, route.num_tokens * self.size).view(-1, self.size)
        tokens = [(token_row[:, peer] >= 0).nonzero()[:, 0].tolist() for peer in range(self.size)]
        given = [rows_at(kind[0], route.num_tokens if any(tokens) else 0, kind[1], kind[2]) for kind in rows]
        payload = [(sent, [kind[sent].clone() for kind in given]) for sent in tokens]
        came = [sent[self.rank] for sent in self.kernels.node(payload)]
        sources = [token for sent, _ in came for token in sent]
        assert sources == numbers_at(route.recv_token, route.num_compact_rows).tolist()
        overflowed = bool(numbers_at(route.geometry, 3)[2])
        pair_row = numbers_at(route.pair_row, route.num_compact_rows * route.num_topk).view(-1, route.num_topk)
        for number, (_, _, row_bytes, out_address, poison, padding) in enumerate(rows):
            out = rows_at(out_address, route.num_rows, row_bytes, row_bytes)
            for first, count in self._padding_of(route):
                out[first : first + count] = pattern_of(padding, row_bytes)
            arrived = torch.cat([kinds[number] for _, kinds in came])
            for compact, slot in (pair_row >= 0).nonzero().tolist():
                row = int(pair_row[compact, slot])
                out[row] = arrived[compact]
                if weights:
                    self._weigh(out[row], row, NAMES[dtype], weights, made_rows, grad_weights)
            if overflowed:
                out[:] = pattern_of(poison, row_bytes)
        if grad_weights:
            for first, count in self._padding_of(route):
                numbers_at(grad_weights, route.num_rows, accumulation_dtype(NAMES[dtype]))[first : first + count] = 0
        return torch.cuda.is_current_stream_capturing()

    def _weigh(
        self, out: Tensor, row: int, dtype: torch.dtype, weights: int, made_rows: int, grad_weights: int
    ) -> None:
        wide = accumulation_dtype(dtype)
        values = out.clone().view(dtype).to(wide)
        if grad_weights:
            made = memory_at(made_rows + row * out.numel(), out.numel()).clone().view(dtype).to(wide)
            numbers_at(grad_weights, row + 1, wide)[row] = (values * made).sum()
        out.copy_((values * numbers_at(weights, row + 1, wide)[row]).to(dtype).view(torch.uint8))

    def _check_places(self, places: Sequence[int], rows: Sequence[Any]) -> None:
        for number, kind in enumerate(rows if places else ()):
            block = self._blocks[(places[0] >> 8 * number & 0xFF) - 1]
            assert block[self.rank] + places[1 + 2 * number] == kind[0]
            assert places[2 + 2 * number] == kind[1]

    def _padding_of(self, route: Any) -> list[tuple[int, int]]:
        """(first, count) of rows that a move fills, as the geometry has them."""
        size, num_local = self.size, route.num_local
        numbers = numbers_at(route.geometry, self.kernels.geometry_length(size, num_local)).tolist()
        at = 4 + size + size * size + size * (self.kernels.max_chunks + 1)
        offsets, counts = numbers[at : at + num_local + 1], numbers[at + num_local + 1 :]
        runs = [(offsets[i] + counts[i], offsets[i + 1] - offsets[i] - counts[i]) for i in range(num_local)]
        return [*runs, (min(numbers[1], route.num_rows), route.num_rows - min(numbers[1], route.num_rows))]

    def combine(self, caller: int, joins: bool, num_sms: int, route: Any, operation: int, *rest: Any) -> bool:
        """csrc/intranode/combine.h."""
        hidden, dtype_number, need_bytes, places, rows, row_bytes, y, poison, dtype, bias_0, bias_1, *more = rest
        weights, is_weighted, weights_dtype, exact, _, _, num_rounds, slot_rows, rounds = more
        if self.refused:
            fill_rows(y, route.num_tokens, row_bytes, poison)
            return torch.cuda.is_current_stream_capturing()
        assert num_sms >= 1
        assert need_bytes <= self.slot_bytes
        assert not exact
        assert slot_rows * row_bytes <= self.slot_bytes
        assert (num_rounds > 1) == (rounds != 0)
        assert not places
        kind, wide = NAMES[dtype], accumulation_dtype(NAMES[dtype])
        pair_row = numbers_at(route.pair_row, route.num_compact_rows * route.num_topk).view(-1, route.num_topk)
        overflowed = bool(numbers_at(route.geometry, 3)[2])
        sums = {}
        for compact, pairs in enumerate(pair_row.tolist()):
            terms = [memory_at(rows + row * row_bytes, row_bytes).clone().view(kind) for row in pairs if row >= 0]
            if weights:
                factors = [numbers_at(weights, row + 1, wide)[row] for row in pairs if row >= 0]
                terms = [term.to(wide) * factor for term, factor in zip(terms, factors, strict=True)]
            nothing = torch.zeros(row_bytes // kind.itemsize, dtype=kind)
            sums[compact] = ordered_sum(terms, kind) if terms else nothing
            if overflowed:
                sums[compact].fill_(float("nan"))
        came = self.kernels.node(sums)
        token_row = numbers_at(route.token_row, route.num_tokens * self.size).view(-1, self.size).tolist()
        for token, places_of_token in enumerate(token_row):
            at = token * row_bytes
            terms = [memory_at(bias + at, row_bytes).clone().view(kind) for bias in (bias_0, bias_1) if bias]
            terms += [came[peer][row] for peer, row in enumerate(places_of_token) if row >= 0]
            out = memory_at(y + at, row_bytes)
            out.copy_(ordered_sum(terms, kind).view(torch.uint8) if terms else torch.zeros_like(out))
        return torch.cuda.is_current_stream_capturing()


def verdict_of(headers: Sequence[tuple[int, ...]], num_match: int) -> int:
    """Of the headers of a node."""
    if any(words[STATUS_WORD] for words in headers):
        return REFUSE
    return GO if len({words[:num_match] for words in headers}) == 1 else DISAGREE


def told(rail: Sequence[tuple[int, ...]], node: int, num_match: int, number: int) -> tuple[int, ...]:
    """What a rank tells its node of an opening: its own header, and what it has heard of the ranks of its rail."""
    words = list(rail[node])
    words[OPENING_WORD] = number
    for other, header in enumerate(rail):
        if header[STATUS_WORD]:
            words[STATUS_WORD], words[ELSEWHERE_WORD] = header[STATUS_WORD], 0 if other == node else other + 1
            words[ELSEWHERE_VALUE_WORD] = 0
            break
        if header[:num_match] != rail[node][:num_match] and words[STATUS_WORD] == 0:
            field = next(place for place in range(num_match) if header[place] != words[place])
            words[STATUS_WORD], words[ELSEWHERE_VALUE_WORD] = DIFFERS_ELSEWHERE, header[field]
            words[ELSEWHERE_WORD] = other + 1 | field << ELSEWHERE_FIELD_SHIFT
    return tuple(words)


class NoStream:
    """Everything has happened already."""

    cuda_stream = 1

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def played(group: dist.ProcessGroup, ranks_per_node: int, staging_bytes: int) -> Iterator[PlayedKernels]:
    """Buffers that are made in here run on played kernels."""
    kernels, construct = PlayedKernels(group, ranks_per_node), NodeCalls.__init__

    def on_cpu(self: NodeCalls, *args: Any, **named: Any) -> None:
        construct(self, *args, **named)
        self._device = torch.device("cpu")

    cuda = {
        "current_device": lambda: 0,
        "is_available": lambda: True,
        "Stream": NoStream,
        "Event": NoStream,
        "current_stream": NoStream,
        "is_current_stream_capturing": lambda: False,
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device: None,
    }
    with ExitStack() as patches:
        for module, name in ((node_memory, "load"), (internode_choice, "load")):
            patches.enter_context(mock.patch.object(module, name, return_value=kernels))
        for module in (node_calls, internode_kernels):
            patches.enter_context(mock.patch.object(module, "require", return_value=kernels))
        patches.enter_context(mock.patch.object(internode_kernels, "STAGING_BYTES", staging_bytes))
        patches.enter_context(mock.patch.object(NodeCalls, "__init__", on_cpu))
        for name, value in cuda.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, value))
        raw = "_cuda_getCurrentRawStream"
        patches.enter_context(mock.patch.object(torch._C, raw, return_value=1, create=True))
        yield kernels
