"""What the ranks say when one of them fails, and how long they take to end: case P05 and its neighbours.

The table of docs/operations.md comes from here:
`python -c "from tests.distributed import test_faults; test_faults.print_table()"`.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from tests.helpers.faults import ROOT, Ended, Rank, World, run_worlds
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import (
    BACKENDS,
    Setup,
    assert_works,
    caught,
    make_case,
    mark,
    open_buffer,
    scale_moe,
    share,
)

LIMIT_SECS = 4.0
GRACE_SECS = 10.0  # over the limit, for finding out who is missing and for a loaded machine
EXIT_SECS = 30.0

# -- the faults -------------------------------------------------------------------------------------------------------


def leave() -> None:
    sys.exit(0)


def die() -> None:
    os._exit(3)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ArithmeticError("this expert cannot go on")


def be_late() -> None:
    time.sleep(LIMIT_SECS / 3)


def be_too_late() -> None:
    time.sleep(LIMIT_SECS + 4.0)


def only_differ() -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """What happens to rank `at`, and what the others print.

    Attributes:
        name: first column of the table.
        act: what the rank does ...
        where: ... before it makes its "layer", before its second "forward", in the "expert" or "backward" of that step.
        says: all of it stands in what every other rank prints; empty if nothing goes wrong for them.
        code: exit code of the rank at fault.
        members: the EP group; None for all ranks.
        differs: a setting of the second step and its value on this rank.
    """

    name: str
    act: Callable[[], None]
    where: str
    says: tuple[str, ...]
    code: int = 1
    at: int = 1
    world: int = 2
    members: tuple[int, ...] | None = None
    differs: tuple[str, Any] | None = None

    @property
    def victims(self) -> list[int]:
        """Ranks of its EP group, without itself."""
        return [rank for rank in self.members or range(self.world) if rank != self.at]


def differing(setting: str, value: Any, *says: str) -> Fault:
    names = {"router": "K", "order": "order of operations"}
    name = f"gives another {names.get(setting, setting)}"
    return Fault(name, only_differ, "forward", ("rank 0 has", "rank 1 has", *says), differs=(setting, value))


KILLED = -int(signal.SIGKILL)
MISSING = "rank 1 did not take part"
NO_STORE = "the store does not answer"

FAULTS = [
    Fault("never makes its layer", be_too_late, "layer", ("did not meet within 4 s", MISSING)),
    Fault("leaves by `sys.exit` before a forward", leave, "forward", ("dispatch on rank 0", MISSING), code=0),
    Fault("exits in a forward", die, "expert", ("combine on rank 0", MISSING), code=3),
    Fault("is killed in a forward", be_killed, "expert", ("combine on rank 0", MISSING), code=KILLED),
    Fault("raises in its expert", fail, "expert", ("combine on rank 0", MISSING)),
    Fault("exits in a backward", die, "backward", ("dispatch backward on rank 0", MISSING), code=3),
    Fault("raises in a backward", fail, "backward", ("dispatch backward on rank 0", MISSING)),
    Fault("is stopped before a forward", stop, "forward", ("dispatch on rank 0", MISSING)),
    Fault("is stopped in a backward", stop, "backward", ("dispatch backward on rank 0", MISSING)),
    Fault("is late, within the limit", be_late, "forward", (), code=0),
    Fault("is later than the limit", be_too_late, "forward", ("dispatch on rank 0", MISSING)),
    Fault("keeps the store, is killed", be_killed, "expert", ("combine on rank", NO_STORE), KILLED, at=0, world=4),
    Fault("keeps the store, is stopped", stop, "expert", ("combine on rank", NO_STORE), at=0, world=4),
    Fault("keeps the store, is stopped before the layer", stop, "layer", ("could not meet", NO_STORE), at=0),
    Fault("is killed, one of four", be_killed, "expert", ("rank 2 did not take part",), KILLED, at=2, world=4),
    Fault(
        "is killed, in one of two EP groups",
        be_killed,
        "forward",
        ("dispatch on rank 1 of the EP group of ranks [1, 3]", "rank 3 did not take part"),
        code=KILLED,
        at=3,
        world=4,
        members=(1, 3),
    ),
    differing("hidden_size", 12, "hidden size H", "has 8", "has 12"),
    differing("router", RouterConfig(topk=1), "slots a token K", "has 2", "has 1"),
    differing("num_experts", 8, "num_experts", "has 4", "has 8"),
    differing("dtype", torch.float64, "dtype of the rows", "has torch.float32", "has torch.float64"),
    differing("layout", "compact", "the layout", "has expert_major", "has compact"),
    differing("order", "forward", "the operation", "has combine backward", "has dispatch"),
    differing("grad mode", False, "whether gradients are enabled (torch.no_grad)", "has True", "has False"),
]


def make_layer(group: dist.ProcessGroup, **changes: Any) -> moe_ep.MoELayer:
    sizes: dict[str, Any] = {"hidden_size": 8, "ffn_hidden_size": 8, "num_experts": 4, "router": RouterConfig(topk=2)}
    torch.manual_seed(0)
    return moe_ep.MoELayer(MoEConfig(**{**sizes, "ep": EPConfig(timeout_secs=LIMIT_SECS), **changes}), group)


def forward(layer: moe_ep.MoELayer) -> Tensor:
    x = torch.ones(3, layer.config.hidden_size, dtype=layer.router.weight.dtype, requires_grad=True)
    y: Tensor = layer(x)
    return y


def step(layer: moe_ep.MoELayer) -> None:
    forward(layer).sum().backward()


def meet_fault(rank: Rank, fault: Fault) -> None:
    """A step that goes well on all ranks, and one in which the fault happens."""

    def act(*_: object) -> None:
        rank.fault_happens()
        fault.act()

    def act_if(where: str) -> None:
        if rank.rank == fault.at and fault.where == where:
            act()

    group = rank.group
    if fault.members is not None:
        others = [other for other in range(fault.world) if other not in fault.members]
        groups = [dist.new_group(list(fault.members)), dist.new_group(others)]
        group = groups[rank.rank in others]
    dist.barrier()
    with rank.noting_errors():
        act_if("layer")
        layer = make_layer(group)
        step(layer)
        dist.barrier()
        if rank.rank == fault.at and fault.where == "expert":
            layer.experts.register_forward_pre_hook(act)
        elif rank.rank == fault.at and fault.where == "backward":
            layer.experts.register_full_backward_pre_hook(act)
        act_if("forward")
        if fault.differs is None:
            step(layer)
        else:
            disagree(layer, group, rank.rank == fault.at, *fault.differs)
        if fault.members is not None and rank.rank in others:
            # The other EP group goes on, and rank 0 keeps the store, until the ranks of the first have ended.
            for _ in range(20):
                time.sleep((LIMIT_SECS + 2.0) / 20)
                step(layer)


def disagree(layer: moe_ep.MoELayer, group: dist.ProcessGroup, differs: bool, setting: str, value: Any) -> None:
    """A step in which one rank differs."""
    if setting == "layout":
        idx, layout = torch.zeros(3, 1).long(), value if differs else "expert_major"
        moe_ep.dispatch(layer.buffer, torch.ones(3, 8), idx, num_experts=4, layout=layout)
    elif setting == "order":
        y = forward(layer)
        forward(layer) if differs else y.sum().backward()
    elif setting == "grad mode":
        with torch.set_grad_enabled(not differs or value):
            forward(layer)
    elif setting == "dtype":
        step(layer.to(value if differs else torch.float32))
    else:
        step(make_layer(group, **({setting: value} if differs else {})))


def recover(rank: Rank, act: Callable[[], None]) -> None:
    """Rank 1 meets a fault that it survives; all ranks reset; a step."""
    layer = make_layer(rank.group)
    step(layer)
    hook = layer.experts.register_forward_pre_hook(lambda *_: act()) if rank.rank == 1 else None
    (rank.folder / f"{rank.rank}.pid").write_text(str(os.getpid()))
    dist.barrier()
    kind, text = caught(lambda: step(layer))
    assert kind in (moe_ep.EPTimeoutError, ArithmeticError), text
    if hook is not None:
        hook.remove()
    elif act is stop:
        os.kill(int((rank.folder / "1.pid").read_text()), signal.SIGCONT)
    layer.buffer.reset()
    before = forward(layer)
    assert torch.equal(before, forward(layer))
    before.sum().backward()


WORLDS = [World(fault.name, meet_fault, fault.world, (fault,)) for fault in FAULTS]
RECOVERIES = [World(act.__name__, recover, world, (act,)) for act, world in ((fail, 2), (stop, 4), (be_too_late, 2))]


@pytest.fixture(scope="module")
def ended() -> dict[str, list[Ended]]:
    """How every rank ended, of every fault and of every recovery."""
    # Those that wait for a limit wait together.
    return run_worlds(sorted([*WORLDS, *RECOVERIES], key=waits_long, reverse=True), num_at_once=10)


def waits_long(world: World) -> bool:
    (what,) = world.args
    return (what.act if isinstance(what, Fault) else what) in (stop, be_too_late)


# case P05; P07 as the whole of a process sees it
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_other_ranks_say_it_in_time_and_end(ended: dict[str, list[Ended]], fault: Fault) -> None:
    for rank, end in enumerate(ended[fault.name]):
        assert not end.stuck, f"rank {rank} hung:\n{end.text}"
        if rank == fault.at:
            assert end.code == fault.code, f"rank {rank}:\n{end.text}"
        elif not fault.says or rank not in fault.victims:
            assert end.code == 0, f"rank {rank}:\n{end.text}"
            assert end.raised_secs is None
        else:
            assert end.code == 1, f"rank {rank}:\n{end.text}"
            said = sentence_of(end)
            assert said.startswith("EPTimeoutError: " if fault.differs is None else "ConfigError: "), said
            assert all(part in said for part in fault.says), said
            assert re.search(r"limit 4 s|within 4 s|\[0, 1\]|ranks of the EP group", said)
            assert end.raised_secs is not None
            assert end.secs is not None
            assert end.raised_secs < LIMIT_SECS + GRACE_SECS
            assert end.secs < EXIT_SECS


# -- the table --------------------------------------------------------------------------------------------------------


def sentence_of(end: Ended) -> str:
    """The error that ended a process, as its traceback says it; "nothing" without one."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?moe_ep\.errors\.(\w+: .*)", end.text, re.MULTILINE)
    return str(errors[-1]) if errors else "nothing"


def table_rows(ended: dict[str, list[Ended]]) -> list[tuple[str, str, str]]:
    """Of every fault: its name, what the first of the other ranks says, the seconds until the last of them ended."""
    rows = []
    for fault in FAULTS:
        ends = [ended[fault.name][rank] for rank in fault.victims]
        first = re.split(r"\. (?=[A-Z(])", sentence_of(ends[0]))[0].rstrip(".")
        secs = max(end.secs or 0.0 for end in ends) if fault.says else None
        rows.append((fault.name, re.sub(r"after [\d.]+ s", "after N s", first), "-" if secs is None else f"{secs:.1f}"))
    return rows


def print_table() -> None:
    """The table of docs/operations.md, in Markdown; one fault at a time, so that the seconds mean something."""
    rows = [("a rank", "the other ranks print", "seconds to exit"), ("---", "---", "---")]
    rows += table_rows(run_worlds(WORLDS, num_at_once=1))
    sys.stdout.write("".join(f"| {' | '.join(row)} |\n" for row in rows))


def test_the_table_in_the_documentation_is_what_happens(ended: dict[str, list[Ended]]) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    written = [tuple(line.strip("| ").split(" | ")) for line in page.splitlines() if line.count(" | ") == 2]
    for name, said, secs in table_rows(ended):
        (found,) = [row for row in written if row[0] == name]
        assert found[1] == said
        assert (found[2] == "-") == (secs == "-")


# -- where all ranks live ---------------------------------------------------------------------------------------------


# case P05
@pytest.mark.parametrize("name", ["fail", "stop", "be_too_late"])
def test_where_all_ranks_live_reset_makes_the_buffer_usable(ended: dict[str, list[Ended]], name: str) -> None:
    for end in ended[name]:
        assert end.code == 0, end.text


CASE = make_case(x=[[1], [2], [3]], idx=[[[0]], [[1]], [[2]]], weights=[[[1]], [[1]], [[1]]], num_experts=3, hidden=2)


def fail_twice(group: dist.ProcessGroup, backend: str) -> list[str]:
    """Rank 1 misses a call; all reset; rank 2 misses a call."""
    dist.barrier(group)
    with open_buffer(group, backend, timeout_secs=2.0) as buffer:
        setup = Setup(backend, "expert_major", 3)
        own, said = share(CASE, group, setup), []
        for absent in (1, 2):
            if buffer.rank != absent:
                said.append(caught(lambda: scale_moe(buffer, own, setup))[1])
            dist.barrier(group)
            buffer.reset()
        assert_works(buffer, group, setup)
        return said


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [pytest.param(3, marks=mark(3))])
def test_a_second_fault_is_blamed_on_the_right_rank(ranks: Pools, backend: str, world: int) -> None:
    first, second = "rank 1 did not take part", "rank 2 did not take part"
    for said, wanted in zip(ranks.run(fail_twice, world, backend), ([first, second], [second], [first]), strict=True):
        assert len(said) == len(wanted)
        assert all(part in text for part, text in zip(wanted, said, strict=True)), said
