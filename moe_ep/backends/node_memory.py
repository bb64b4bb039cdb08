"""Memory that the ranks of one node open of each other, and how they meet to open, grow and reset it.

The host side of docs/protocol.md: barriers have names, a generation is one more than the highest of all ranks, and a
segment is freed only when no rank has it open.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from moe_ep._native import NativeKernels, load
from moe_ep._native.exchange import NativeExchange
from moe_ep.backends.meeting import STORE_KEEPER, STORE_SECS, meet, name_ranks, within
from moe_ep.errors import EPTimeoutError
from moe_ep.placement import fingerprint_of

_POLL_SECS = 0.0005
_UNIT_BYTES = 8 << 20  # segments grow in such steps
_RESET_SLACK_SECS = 5.0  # how much later than its limit another rank may come out of a call that times out


class Gathering:
    """All-gathers of short texts over the store, each under a name that is used once.

    Args:
        store: of the default process group, with a prefix that only this group and purpose has.
        ranks: global ranks of the group.
        rank: this rank's place in it.
    """

    def __init__(self, store: c10d.Store, ranks: Sequence[int], rank: int) -> None:
        self.store, self.ranks, self.rank = store, tuple(ranks), rank

    def all(self, name: str, text: str, limit_secs: float) -> list[str]:
        """Every rank's text, in rank order. Nobody leaves before all have come: it is a barrier too.

        Raises:
            EPTimeoutError: a rank did not come within the limit.
        """
        keys = [f"{name}/{peer}" for peer in range(len(self.ranks))]

        def work() -> list[int]:
            """Who is missing. Nobody, where the last one came just behind the limit: the others go on then."""
            self.store.set(keys[self.rank], text)
            deadline = time.monotonic() + limit_secs
            while not self.store.check(keys):
                if time.monotonic() > deadline:
                    return [peer for peer, key in enumerate(keys) if not self.store.check([key])]
                time.sleep(_POLL_SECS)
            return []

        try:
            missing = within(limit_secs + STORE_SECS, work)
            if not missing:
                return within(STORE_SECS, lambda: [self.store.get(key).decode() for key in keys])
        except RuntimeError as error:
            raise EPTimeoutError(
                f"the EP group of ranks {list(self.ranks)} could not meet, because the store does not answer: "
                f"{STORE_KEEPER} has ended or is stopped. ({error})"
            ) from error
        raise EPTimeoutError(
            f"the EP group of ranks {list(self.ranks)} did not meet for {name.split('/')[0]} within "
            f"{limit_secs:g} s: {name_ranks([self.ranks[peer] for peer in missing])} did not take part. Look at "
            "their logs."
        )

    def leave(self, name: str, text: str) -> None:
        """This rank's text, for those that look for it."""
        within(STORE_SECS, lambda: self.store.set(f"{name}/{self.rank}", text))

    def left(self, name: str, rank: int, limit_secs: float) -> str | None:
        """What `rank` left under `name`, or None if nothing within the limit."""
        key, deadline = f"{name}/{rank}", time.monotonic() + limit_secs

        def work() -> str | None:
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_SECS)
            return self.store.get(key).decode()

        try:
            return within(limit_secs + STORE_SECS, work)
        except RuntimeError:  # the store is gone: the text is not worth another failure
            return None


def host_id() -> str:
    """This machine as long as it runs: the kernel's boot number, which containers on it share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def why_unavailable(
    group: dist.ProcessGroup | None, timeout_secs: float, reads: Sequence[int] | None = None, obstacle: str = ""
) -> str | None:
    """Why the ranks of `group` cannot read each other's GPU memory, the same sentence on every rank; None if they can.

    Collective over the group.

    Args:
        group: the EP group.
        timeout_secs: limit of every wait.
        reads: places in the group whose memory this rank will read; None for all.
        obstacle: what else is in this rank's way.
    """
    kernels = load()
    problem, facts = "", {"host": host_id(), "pci": ""}
    if kernels is None:
        problem = "this install has no CUDA kernels, because no nvcc was found when it was made"
    elif not torch.cuda.is_available():
        problem = "torch sees no CUDA device"
    else:
        facts["pci"] = kernels.pci_bus_id()
        if dist.is_initialized() and group is not None and reads is None:
            if dist.get_world_size(group) > kernels.max_ranks:
                problem = f"the group has more than {kernels.max_ranks} ranks"
    problem = problem or obstacle
    if group is None or dist.get_world_size(group) == 1:
        return problem or None
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    base = c10d.PrefixStore("moe_ep/node-check/" + "-".join(map(str, ranks)), c10d._get_default_store())
    number = meet(base, ranks, rank, timeout_secs)
    gathering = Gathering(c10d.PrefixStore(str(number), base), ranks, rank)
    all_facts = [json.loads(text) for text in gathering.all("facts", json.dumps(facts | {"no": problem}), timeout_secs)]
    if not problem and kernels is not None:
        near = range(len(ranks)) if reads is None else reads
        problem = _obstacle(kernels, facts, [all_facts[peer] for peer in near], [ranks[peer] for peer in near])
    for peer, text in enumerate(gathering.all("verdict", problem, timeout_secs)):
        if text:
            return f"on rank {ranks[peer]} {text}"
    return None


def _obstacle(
    kernels: NativeKernels, facts: dict[str, str], all_facts: list[dict[str, str]], ranks: Sequence[int]
) -> str:
    for peer, other in zip(ranks, all_facts, strict=True):
        if other["no"]:
            return ""  # said by that rank itself
        if other["host"] != facts["host"]:
            return f"rank {peer} is on another machine"
        if not kernels.can_reach(other["pci"]):
            return f"the GPU of rank {peer} ({other['pci']}) cannot be reached from {facts['pci']}"
    return ""


class _DeviceBytes:
    """Device memory as torch takes it in, with what keeps it alive."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class NodeMemory:
    """One rank's control block and segment, opened by the others. Collective: construct, `grow`, `reset`.

    Args:
        group: the EP group, or None for a single rank.
        timeout_secs: limit of every wait, on the host and on the device.
        slot_bytes: what each of the two slots of a segment holds at first.
        part: places in the group of the ranks that take part, this one among them; None for all.

    Attributes:
        ranks, rank: global ranks that take part, and this one's place among them.
        group_ranks: those of the whole group.
        name: of this memory among those of the group.
        generation: how often it was begun anew.
        fingerprint: of both, the same on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, timeout_secs: float, slot_bytes: int, part: range | None = None
    ) -> None:
        kernels = load()
        assert kernels is not None
        self.ranks: tuple[int, ...] = (0,)
        self.group_ranks: tuple[int, ...] = (0,)
        self.rank = 0
        if group is not None:
            ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
            part = range(len(ranks)) if part is None else part
            self.ranks, self.rank = tuple(ranks[place] for place in part), part.index(rank)
            self.group_ranks = tuple(ranks)
        alone = len(self.ranks) == 1
        self.timeout_secs = timeout_secs
        self.generation = 0
        self._intact = False
        self._blocks: list[tuple[int, int]] = []
        self._gathering: Gathering | None = None
        if not alone:
            base = c10d.PrefixStore("moe_ep/node/" + "-".join(map(str, self.ranks)), c10d._get_default_store())
            number = meet(base, self.ranks, self.rank, timeout_secs)
            self._store = c10d.PrefixStore(str(number), base)
            self._gathering = Gathering(self._store, self.ranks, self.rank)
            self.name = number
        else:
            self.name = 0
        self.exchange = self._make_exchange(kernels)
        self._share("control", self.exchange.export_control, self.exchange.open_control)
        # One size on all ranks: a rank finds its peers' slots by its own.
        sizes = [int(text) for text in self._gather("start/size", str(slot_bytes), timeout_secs)]
        self._open(max(sizes), "start")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor that the peers read where it lies. Collective; shapes may differ.

        Its memory lives as long as this object and the tensor. A buffer has room for eight.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        address = self.exchange.allocate_block(num_bytes)
        self._share(f"block/{len(self._blocks)}", self.exchange.export_block, self.exchange.open_block)
        self._blocks.append((address, num_bytes))
        bytes_of = torch.as_tensor(_DeviceBytes(address, num_bytes, self.exchange), device="cuda")
        return bytes_of.view(dtype).view(tuple(shape))

    def adopt(self, export: Callable[[], bytes] | None, addresses: Sequence[int]) -> int:
        """Makes memory that somebody else owns readable in place; the number of the block. Collective.

        Args:
            export: of this rank's memory, for peers that open it; None where `addresses` say where it lies already.
            addresses: of every rank's memory, as this GPU finds it. Only this rank's counts where `export` is given.
        """
        known = [address if export is None or peer == self.rank else 0 for peer, address in enumerate(addresses)]
        self.exchange.adopt_block(known)
        if export is not None:
            self._share(f"block/{len(self._blocks)}", export, self.exchange.open_block)
        self._blocks.append((0, 0))  # its tensors are not the caller's: `places_of` does not look for them
        return len(self._blocks)

    def places_of(self, kinds: Sequence[Tensor]) -> tuple[int, ...]:
        """Where tensors lie in blocks, for a header: a byte each with the number of the block, then offset and stride
        of each, bytes.

        Empty where one of them lies in none.
        """
        if not self._blocks:
            return ()
        numbers, places = 0, []
        for kind, rows in enumerate(kinds):
            for number, (begin, num_bytes) in enumerate(self._blocks, start=1):
                if begin <= rows.data_ptr() < begin + num_bytes:
                    numbers |= number << 8 * kind
                    places += [rows.data_ptr() - begin, rows.stride(0) * rows.element_size()]
                    break
            else:
                return ()
        return (numbers, *places)

    def grow(self, num_bytes: int) -> None:
        """Replaces the segments by larger ones. Collective; no kernel of this rank runs on the old ones.

        Raises:
            EPTimeoutError: a rank did not come; the mappings of this rank may be gone until `reset`.
        """
        name = f"growth/{self.generation}"
        self._gather(f"{name}/begin", "", self.timeout_secs)
        self._intact = False
        self.exchange.close_segments()
        self._gather(f"{name}/closed", "", self.timeout_secs)
        self._open(num_bytes, name)

    def reset(self) -> None:
        """Begins a new generation; rebuilds the segments where a rank lost its mappings. Collective."""
        patience_secs = 2 * self.timeout_secs + _RESET_SLACK_SECS
        if self._gathering is None:
            self._begin(self.generation + 1)
            return
        number = meet(c10d.PrefixStore("resets", self._store), self.ranks, self.rank, patience_secs)
        name = f"reset/{number}"
        mine = json.dumps([self.generation, self._intact, self.exchange.slot_bytes])
        notes = [json.loads(text) for text in self._gather(f"{name}/begin", mine, patience_secs)]
        self.generation = max(generation for generation, _, _ in notes)
        if all(intact and size == notes[0][2] for _, intact, size in notes):
            self._begin(self.generation + 1)
            return
        self._intact = False
        self.exchange.close_segments()
        self._gather(f"{name}/closed", "", patience_secs)
        self._open(max(size for _, _, size in notes), name)

    def texts(self, name: str, limit_secs: float, rank: int) -> str | None:
        """What `rank` left under `name`, or None if nothing within the limit."""
        return None if self._gathering is None else self._gathering.left(name, rank, limit_secs)

    def leave_text(self, name: str, text: str) -> None:
        if self._gathering is not None:
            self._gathering.leave(name, text)

    def gather(self, name: str, text: str) -> list[str]:
        """Every rank's text, in rank order, under a name that is used once. Collective, a barrier too.

        Raises:
            EPTimeoutError: a rank did not come.
        """
        return self._gather(name, text, self.timeout_secs)

    def close(self) -> None:
        self.exchange.close_segments()

    def _make_exchange(self, kernels: NativeKernels) -> NativeExchange:
        return kernels.Exchange(rank=self.rank, size=len(self.ranks), timeout_secs=self.timeout_secs)

    def _open(self, num_bytes: int, name: str) -> None:
        units = max(1, -(-num_bytes // _UNIT_BYTES))
        self.exchange.allocate_segment(units * _UNIT_BYTES)
        generations = self._share(f"{name}/segment", self.exchange.export_segment, self.exchange.open_segment)
        self._begin(max(generations) + 1)
        # A peer may call, and write flags of this generation, as soon as it is here; they are read as soon as we are.
        self._intact = True

    def _begin(self, generation: int) -> None:
        self.exchange.begin_generation(generation)
        self.generation = generation
        self.fingerprint = fingerprint_of(self.name, generation)

    def _share(self, name: str, export: Callable[[], bytes], opens: Callable[[int, bytes], None]) -> list[int]:
        """Opens every peer's exported memory; returns the generations of all ranks."""
        if self._gathering is None:
            return [self.generation]
        notes = self._gather(name, json.dumps([self.generation, export().hex()]), self.timeout_secs)
        for peer, note in enumerate(notes):
            if peer != self.rank:
                opens(peer, bytes.fromhex(json.loads(note)[1]))
        return [json.loads(note)[0] for note in notes]

    def _gather(self, name: str, text: str, limit_secs: float) -> list[str]:
        return [text] if self._gathering is None else self._gathering.all(name, text, limit_secs)
