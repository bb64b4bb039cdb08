"""The kernels between nodes played on the CPU: they move rows, as csrc says, between processes that share a gloo group.

What a kernel gets as addresses are addresses of CPU memory here, and what it would read of another rank travels with
`all_gather_object`: so every rank of the group makes the same calls. Streams are none: everything happens at once,
which the order of launches on the streams must allow.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from moe_ep.backends.device_faults import GO, GROW
from moe_ep.backends.node_calls import NodeCalls
from moe_ep.backends.node_header import NEED_WORD
from moe_ep.ordered_sum import accumulation_dtype
from tests.helpers.fake_exchange import KernelSizes

SIGNAL_BYTES = 512  # of a block, before its slots
PAGE_BYTES = 4096
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
NAMES["float64"] = torch.float64


def memory_at(address: int, num_bytes: int) -> Tensor:
    """[num_bytes] uint8 over memory of this process."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    assert address, "a kernel was given no address"
    return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)


def numbers_at(address: int, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return memory_at(address, count * dtype.itemsize).view(dtype)


def rows_at(address: int, num_rows: int, stride: int, row_bytes: int) -> Tensor:
    """[num_rows, row_bytes] uint8."""
    if num_rows == 0 or row_bytes == 0:
        return torch.empty(num_rows, row_bytes, dtype=torch.uint8)
    flat = memory_at(address, (num_rows - 1) * stride + row_bytes)
    return flat.as_strided((num_rows, row_bytes), (stride, 1))


def ordered_sum(terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    wide = accumulation_dtype(dtype)
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    return total.to(dtype)


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

    def __init__(self, kernels: PlayedKernels, node: int, num_nodes: int, flow_bytes: int, **_: Any) -> None:
        self.kernels, self.node, self.num_nodes, self.flow_bytes = kernels, node, num_nodes, flow_bytes
        self.block_bytes = SIGNAL_BYTES + 4 * num_nodes * flow_bytes
        self._memory = torch.full((self.block_bytes,), 0xFF, dtype=torch.uint8)
        self.block = self._memory.data_ptr()
        self._sent: dict[int, list[Tensor]] = {}
        self._is_full = [False, False]
        self._taken: set[int] = set()  # rounds of the call
        self._on_the_way: set[int] = set()  # rounds that this rank has put, as long as nothing says that they are there
        self.num_rounds = 0

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

    def settle(self, stream: int) -> None:
        self._on_the_way.clear()

    def sent_bytes(self) -> int:
        return self.kernels.crossed[1]

    def send(self, round: Any, rows: Sequence[tuple[int, int, int]], token: int, num_sms: int, stream: int) -> None:
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
        assert round.number not in self._sent
        assert round.number - 2 in {-2, -1, *self._taken}, "launched before what it waits for on the other ranks"

    def wait(self, round: Any, stream: int) -> None:
        slot = round.number % 2
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
        self.state_address = self.record_address = 8
        self._blocks: list[Sequence[int]] = []
        self._header = (0,) * 32
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

    def begin_generation(self, generation: int) -> None: ...

    def launch_on(self, stream: int, bulk_copies: bool) -> None: ...

    def has_fault(self) -> bool:
        return False

    def take_faults(self) -> list[Any]:
        return []

    def drain(self, header: bytes) -> None: ...

    def header_only(self, caller: int, joins: bool, header: bytes, num_match: int, question: int) -> bool:
        words = memory_at(ctypes.addressof(ctypes.create_string_buffer(header)), len(header)).view(torch.int64)
        self._header = tuple(torch.frombuffer(bytearray(header), dtype=torch.int64).tolist())
        assert len(words) == 32
        self._verdict = GROW if self._header[NEED_WORD] > self.slot_bytes else GO
        return torch.cuda.is_current_stream_capturing()

    def wait_answer(self, question: int, limit_secs: float) -> Answer:
        return self.answer()

    def answer(self) -> Answer:
        return self._verdict, 0, -1, 0, (0, 0, False, False, (), (), ())

    def headers(self, size: int) -> bytes:
        return bytes(torch.tensor(self._header, dtype=torch.int64).repeat(size).view(torch.uint8).tolist())

    # -- rows -------------------------------------------------------------------------------------------------------

    def move(self, caller: int, joins: bool, num_sms: int, route: Any, operation: int, hidden: int, *rest: Any) -> bool:
        """csrc/intranode/move.h."""
        dtype_number, need_bytes, places, rows, dtype, weights, made_rows, grad_weights = rest
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
                out[first : first + count] = _pattern(padding, row_bytes)
            arrived = torch.cat([kinds[number] for _, kinds in came])
            for compact, slot in (pair_row >= 0).nonzero().tolist():
                row = int(pair_row[compact, slot])
                out[row] = arrived[compact]
                if weights:
                    self._weigh(out[row], row, NAMES[dtype], weights, made_rows, grad_weights)
            if overflowed:
                out[:] = _pattern(poison, row_bytes)
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
        weights, is_weighted, weights_dtype, exact, _, _ = more
        assert num_sms >= 1
        assert need_bytes <= self.slot_bytes
        assert not exact
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


def _pattern(word: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(bytearray(word.to_bytes(8, "little") * (num_bytes // 8)), dtype=torch.uint8)


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
