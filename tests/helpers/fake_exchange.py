"""Backend `intranode` without a GPU: a node whose kernels only keep the books.

The ranks of a `FakeNode` are threads of one process (`run`), or one rank each of several processes that share a real
store. A `FakeExchange` has the methods of `moe_ep._native.exchange.NativeExchange`. It does not move rows; it keeps
what it was handed, agrees on verdicts as docs/protocol.md says, and complains where memory is freed that a peer has
open.
"""

from __future__ import annotations

import ctypes
import inspect
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from moe_ep._native.exchange import Answer, NativeExchange
from moe_ep.backends import node_calls, node_memory
from moe_ep.backends.device_faults import DISAGREE, GO, GROW, REFUSE
from moe_ep.backends.header import ERRORS
from moe_ep.backends.node_header import DOES_NOT_FIT, NEED_WORD, STATUS_WORD
from tests.helpers.fake_streams import FakeEvent, FakeStream

PAGE_BYTES = 2 << 20
OPERATION_WORD, HANDLE_WORD, HIDDEN_WORD, DTYPE_WORD = 0, 2, 3, 6  # csrc/exchange/exchange.h
WEIGHTS_DTYPE_WORD, EXACT_WORD, ROUNDS_WORD = 7, 10, 14
PLACES_WORD, FIRST_OFFSET_WORD = 20, 26
Result = TypeVar("Result")
Fault = tuple[str, list[int]]


@dataclass(frozen=True)
class FakeGroup:
    ranks: tuple[int, ...]
    rank: int


class FakeNode:
    """What the ranks of a node share.

    Attributes:
        events: (rank, what) of everything that happens to memory, in order.
        exchanges: by rank, the newest.
        kernels_of: by rank; None stands for an install without kernels.
        streams: by what csrc knows them by.
        is_capturing: whether the current stream is being captured.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.store = dist.HashStore()
        self.change = threading.Condition()
        self.events: list[tuple[int, str]] = []
        self.opened: defaultdict[bytes, set[int]] = defaultdict(set)
        self.headers: defaultdict[tuple[int, int], dict[int, bytes]] = defaultdict(dict)
        self.exchanges: dict[int, FakeExchange] = {}
        self.kernels_of: dict[int, FakeKernels | None] = {rank: FakeKernels(self, rank) for rank in range(size)}
        self.streams: dict[int, FakeStream] = {}
        self.is_capturing = False
        self._thread = threading.local()

    @property
    def rank(self) -> int:
        """Of the thread that asks."""
        return int(getattr(self._thread, "rank", 0))

    def group(self, rank: int, first: int = 0) -> Any:
        """What stands for a process group; global ranks begin at `first`."""
        return FakeGroup(tuple(range(first, first + self.size)), rank)

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """`work(rank)` on a thread a rank; the results in rank order. Raises what the first rank raised that did."""
        results: dict[int, Result] = {}
        errors: dict[int, BaseException] = {}

        def begin(rank: int) -> None:
            self._thread.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:  # noqa: BLE001 (raised again on the thread that waits)
                errors[rank] = error

        threads = [threading.Thread(target=begin, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank did not end"
        for rank in sorted(errors):
            raise errors[rank]
        return [results[rank] for rank in range(self.size)]

    def note(self, rank: int, what: str) -> None:
        with self.change:
            self.events.append((rank, what))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
        """Puts the node where the backend looks for kernels, groups, the store and CUDA."""
        monkeypatch.setattr(node_memory, "load", lambda: self.kernels_of[self.rank])
        monkeypatch.setattr(node_calls, "require", lambda: self.kernels_of[self.rank])
        groups = {
            "get_process_group_ranks": lambda group: list(group.ranks),
            "get_rank": lambda group: group.rank,
            "get_world_size": lambda group: len(group.ranks),
            "is_initialized": lambda: True,
        }
        monkeypatch.setattr(node_memory, "dist", SimpleNamespace(**groups))
        stores = {"PrefixStore": c10d.PrefixStore, "_get_default_store": lambda: self.store}
        monkeypatch.setattr(node_memory, "c10d", SimpleNamespace(**stores))
        monkeypatch.setattr(torch, "as_tensor", lambda rows, device: _memory_of(rows, device))
        current_of = threading.local()

        def new_stream(device: torch.device | None = None, priority: int = 0) -> FakeStream:
            stream = FakeStream(device, priority)
            self.streams[stream.cuda_stream] = stream
            return stream

        def current(device: object = None) -> FakeStream:
            if not hasattr(current_of, "stream"):
                current_of.stream = new_stream()
            stream: FakeStream = current_of.stream
            return stream

        cuda = {
            "current_device": lambda: 0,
            "is_available": lambda: True,
            "Stream": new_stream,
            "Event": FakeEvent,
            "current_stream": current,
            "is_current_stream_capturing": lambda: self.is_capturing,
            "device": lambda device: nullcontext(),
            "synchronize": lambda device: None,
        }
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        raw = "_cuda_getCurrentRawStream"
        monkeypatch.setattr(torch._C, raw, lambda device_idx: current().cuda_stream, raising=False)
        return self


def _memory_of(rows: Any, device: str) -> Tensor:
    """What torch makes of `__cuda_array_interface__`, where the address is one of this process."""
    interface = rows.__cuda_array_interface__
    assert (interface["typestr"], interface["version"], device) == ("|u1", 3, "cuda")
    (num_bytes,), (address, is_read_only) = interface["shape"], interface["data"]
    assert not is_read_only
    whole = torch.frombuffer((ctypes.c_ubyte * max(1, num_bytes)).from_address(address), dtype=torch.uint8)
    return whole[:num_bytes]


class KernelSizes:
    """Sizes and cuts as csrc/exchange/exchange.h has them."""

    max_chunks: int = 64

    def has_bulk_copies(self) -> bool:
        return True

    def geometry_length(self, size: int, num_local: int) -> int:
        return 4 + size + size * size + size * (self.max_chunks + 1) + 2 * num_local + 1

    def round_geometry_length(self, size: int) -> int:
        return 4 + size + size * size + size * (self.max_chunks + 1)

    def chunk_tokens(self, num_tokens: int) -> int:
        even = -(-num_tokens // self.max_chunks)
        return 32 if even <= 32 else -(-even // 8) * 8


class FakeRoute(SimpleNamespace):
    """What a launch reads of it is what it holds then."""

    def set_rows(self, num_rows: int, num_compact_rows: int) -> None:
        self.num_rows, self.num_compact_rows = num_rows, num_compact_rows


@dataclass
class FakeKernels(KernelSizes):
    """`moe_ep._native.exchange.ExchangeKernels`, with the numbers of csrc/exchange/exchange.h."""

    node: FakeNode
    rank: int
    max_ranks: int = 16
    max_chunks: int = 64
    max_local_experts: int = 2048
    unreachable: tuple[str, ...] = ()

    def Exchange(self, *, rank: int, size: int, timeout_secs: float) -> FakeExchange:  # noqa: N802 (a class)
        return FakeExchange(self.node, rank, size, timeout_secs)

    def PlanInput(self, **arguments: Any) -> SimpleNamespace:  # noqa: N802 (a class)
        return SimpleNamespace(**arguments)

    def PlanOutput(self, **arguments: Any) -> SimpleNamespace:  # noqa: N802 (a class)
        return SimpleNamespace(**arguments)

    def Route(self, **arguments: Any) -> FakeRoute:  # noqa: N802 (a class)
        return FakeRoute(**arguments)

    def pci_bus_id(self) -> str:
        return f"0000:0{self.rank}:00.0"

    def can_reach(self, peer_pci_bus_id: str) -> bool:
        return peer_pci_bus_id not in self.unreachable


@dataclass
class Launch:
    """One call of a kernel: its name, what it was handed, and the words of its header."""

    name: str
    arguments: dict[str, Any]
    words: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.words = struct.unpack("32q", self.arguments["header"])


class FakeExchange:
    """One rank's exchange.

    Attributes:
        launches: every kernel that was started.
        faults: the mapped record, as `take_faults` gives it; a timeout stays in it.
        plan_rows: (S, R) of the next plan.
        plan_counts: tokens of each rank, rows from each to each, pairs from each, rows of each local expert.
        bad: (slot, id) of an id that is none, as a plan reports it.
        is_stuck: the device begins nothing.
        is_full: there is no memory for another segment.
    """

    def __init__(self, node: FakeNode, rank: int, size: int, timeout_secs: float) -> None:
        self.node, self.rank, self.size, self.timeout_secs = node, rank, size, timeout_secs
        self.slot_bytes = 0
        self.launches: list[Launch] = []
        self.faults: list[Fault] = []
        self.plan_rows = (0, 0)
        self.plan_counts: tuple[Any, ...] = ((0,) * size, (0,) * (size * size), (0,) * size, [])
        self.bad = (-1, 0)
        self.is_stuck = self.is_full = False
        self.generation = self.epoch = 0
        self._num_segments = 0
        self._blocks: list[Tensor] = []
        self._mine = b""
        self._asked = (0, 0)
        self._questions = {0}
        self._verdict = GO
        self._num_match = 0
        node.exchanges[rank] = self

    state_address = record_address = 8

    def named(self, name: str) -> list[Launch]:
        return [launch for launch in self.launches if launch.name == name]

    # -- memory -----------------------------------------------------------------------------------------------------

    def export_control(self) -> bytes:
        return f"control {self.rank}".encode()

    def export_segment(self) -> bytes:
        return self._mine

    def open_control(self, peer: int, exported: bytes) -> None:
        self._open("control", peer, exported)

    def open_segment(self, peer: int, exported: bytes) -> None:
        self._open("segment", peer, exported)
        with self.node.change:
            self.node.opened[exported].add(self.rank)

    def allocate_block(self, num_bytes: int) -> int:
        if len(self._blocks) == 8:
            raise RuntimeError("the buffer holds 8 tensors that peers read in place")
        self._blocks.append(torch.zeros(max(16, num_bytes), dtype=torch.uint8))
        return self._blocks[-1].data_ptr()

    def export_block(self) -> bytes:
        return f"block {self.rank}.{len(self._blocks)}".encode()

    def open_block(self, peer: int, exported: bytes) -> None:
        self._open("block", peer, exported)

    def close_segments(self) -> None:
        self.node.note(self.rank, "close")
        with self.node.change:
            for ranks in self.node.opened.values():
                ranks.discard(self.rank)

    def allocate_segment(self, slot_bytes: int) -> None:
        with self.node.change:
            assert not self.node.opened[self._mine], f"rank {self.rank} frees a segment that a peer has open"
        if self.is_full:
            self.slot_bytes = 0
            raise RuntimeError("intranode: memory for the segment failed with cudaErrorMemoryAllocation")
        self._num_segments += 1
        self._mine = f"segment {self.rank}.{self._num_segments}".encode()
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self.node.note(self.rank, "allocate")

    def begin_generation(self, generation: int) -> None:
        self.generation, self.epoch = generation, 0
        self.faults.clear()
        self.node.note(self.rank, f"generation {generation}")

    def _open(self, kind: str, peer: int, exported: bytes) -> None:
        name, owner = exported.decode().split(" ")
        assert (name, owner.split(".")[0]) == (kind, str(peer)), f"rank {peer} exported {exported!r}"
        self.node.note(self.rank, f"open {exported.decode()}")

    # -- calls ------------------------------------------------------------------------------------------------------

    def launch_on(self, stream: int, bulk_copies: bool) -> None:
        self.stream, self.bulk_copies = stream, bulk_copies

    def wait_answer(self, question: int, limit_secs: float) -> Answer | None:
        headers = self.node.headers[self._asked]
        if question not in self._questions:
            raise RuntimeError("intranode: a kernel ended without an answer.")
        with self.node.change:
            if self.is_stuck or not self.node.change.wait_for(lambda: len(headers) == self.size, limit_secs):
                return None
        words = [struct.unpack("32q", headers[rank]) for rank in range(self.size)]
        statuses = [row[STATUS_WORD] for row in words]
        if any(0 < status < DOES_NOT_FIT for status in statuses):
            self._verdict = REFUSE
        elif any(row[: self._num_match] != words[0][: self._num_match] for row in words):
            self._verdict = DISAGREE
        else:
            self._verdict = GROW if DOES_NOT_FIT in statuses else GO
        if self._verdict != GO:
            self.faults.append(self.refusal(self._verdict))
        return self.answer()

    def refusal(self, verdict: int) -> Fault:
        """What the record holds of the call that was asked about, with the headers of all ranks."""
        of_ranks = [struct.unpack("32q", self.node.headers[self._asked][rank]) for rank in range(self.size)]
        return "refused", [verdict, self._asked[1], 0, 0, 0, 0, 0, 0, *(word for words in of_ranks for word in words)]

    def answer(self) -> Answer:
        headers = [struct.unpack("32q", header) for header in self.node.headers[self._asked].values()]
        x_needs_grad, weights_need_grad = (any(words[word] for words in headers) for word in (29, 30))
        tokens, rows, pairs, _ = self.plan_counts
        assert (len(tokens), len(rows), len(pairs)) == (self.size, self.size**2, self.size)
        counts = (*self.plan_rows, x_needs_grad, weights_need_grad, tokens, rows, pairs)
        return self._verdict, self._asked[1], *self.bad, counts

    def expert_counts(self, num_local: int, alignment: int) -> tuple[list[int], list[int]]:
        experts = self.plan_counts[3]
        assert len(experts) == num_local
        return list(experts), [-(-count // alignment) * alignment for count in experts]

    def headers(self, size: int) -> bytes:
        return b"".join(self.node.headers[self._asked][rank] for rank in range(size))

    def has_fault(self) -> bool:
        return bool(self.faults)

    def take_faults(self) -> list[Fault]:
        taken = list(self.faults)
        self.faults = [fault for fault in taken if fault[0] == "timeout"]
        return taken

    def join(self, caller: int) -> None:
        self._wait(self.node.streams[caller], self.node.streams[self.stream])

    def plan(self, *given: Any) -> bool:
        """Both kernels between one pair of waits, kept by their names; the second with what its output says."""
        named = _named("plan", given)
        output = named.pop("output")
        if self.bad[0] >= 0 and named["question"]:
            words = list(struct.unpack("32q", named["header"]))
            words[STATUS_WORD] = words[STATUS_WORD] or ERRORS.index(ValueError)
            named["header"] = struct.pack("32q", *words)
        is_captured = self._launch("plan_count", named)
        if output is not None:
            self.launches.append(Launch("plan_fill", self.launches[-1].arguments | vars(output) | {"question": 0}))
        return is_captured

    def plan_fill(self, *given: Any) -> bool:
        named = _named("plan_fill", given)
        return self._keep("plan_fill", named | vars(named.pop("output")))

    def move(self, *given: Any) -> bool:
        return self._launch("move", self._along(_named("move", given)))

    def combine(self, *given: Any) -> bool:
        return self._launch("combine", self._along(_named("combine", given)))

    def numbers_home(self, *given: Any) -> bool:
        named = _named("numbers_home", given)
        route = named["route"]
        named = self._along({"hidden": route.num_topk, "places": ()} | named)
        named["pair_row"] = route.pair_row if route.expert_major else 0
        return self._launch("numbers_home", named)

    def all_reduce(self, *given: Any) -> bool:
        return self._launch("all_reduce", _named("all_reduce", given))

    def header_only(self, *given: Any) -> bool:
        return self._launch("header_only", _named("header_only", given))

    def done_only(self, *given: Any) -> bool:
        return self._keep("done_only", _named("done_only", given))

    def drain(self, header: bytes) -> None:
        self.launches.append(Launch("drain", {"header": header, "stream": self.stream}))

    def _along(self, named: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call along a route, with what the route says and the header that csrc makes of both."""
        route = dict(vars(named["route"]))
        words = list(struct.unpack("32q", route.pop("header")))
        words[HANDLE_WORD] = route["uid"]
        words[OPERATION_WORD], words[HIDDEN_WORD] = named["operation"], named["hidden"]
        words[DTYPE_WORD], words[WEIGHTS_DTYPE_WORD] = named["dtype_number"], named.get("weights_dtype", -1)
        words[EXACT_WORD], words[NEED_WORD] = named.get("exact", False), named["need_bytes"]
        words[ROUNDS_WORD] = named.get("num_rounds", 1)
        words[FIRST_OFFSET_WORD] = named.get("pairs_offset", 0)
        words[FIRST_OFFSET_WORD + 1] = named.get("weights_offset", 0)
        words[PLACES_WORD : PLACES_WORD + len(named["places"])] = named["places"]
        made = {
            "header": struct.pack("32q", *words),
            "is_registered": bool(named["places"]),
            "use_tma": self.bulk_copies,
        }
        return route | made | named

    def _keep(self, name: str, named: dict[str, Any]) -> bool:
        """A kernel on the stream of the exchange, between what the caller's has been given and what it will be."""
        own, callers = self.node.streams[self.stream], self.node.streams[named["caller"]]
        self._wait(own, callers)
        words = list(struct.unpack("32q", named["header"]))
        if words[STATUS_WORD] == 0 and words[NEED_WORD] > self.slot_bytes:
            words[STATUS_WORD] = DOES_NOT_FIT
        named = named | {"header": struct.pack("32q", *words), "stream": self.stream}
        self.launches.append(Launch(name, named))
        if named["joins"]:
            self._wait(callers, own)
        return self.node.is_capturing

    def _wait(self, stream: FakeStream, other: FakeStream) -> None:
        if stream is not other:
            stream.past.append(other)

    def _launch(self, name: str, named: dict[str, Any]) -> bool:
        """A kernel that opens a call: its header goes to everybody."""
        is_captured = self._keep(name, named)
        self._asked, self._num_match = (self.generation, self.epoch), named["num_match"]
        self._questions.add(named.get("question", 0))
        self.epoch += 1
        with self.node.change:
            self.node.headers[self._asked][self.rank] = self.launches[-1].arguments["header"]
            self.node.change.notify_all()
        return is_captured


def _named(kernel: str, given: Sequence[Any]) -> dict[str, Any]:
    """The arguments of a launch by the names that `NativeExchange` has for them."""
    names = list(inspect.signature(getattr(NativeExchange, kernel)).parameters)[1:]
    return dict(zip(names, given, strict=True))


def packed(words: Sequence[int]) -> bytes:
    """A header of 32 words; those not given are 0."""
    return struct.pack("32q", *words, *[0] * (32 - len(words)))
