"""Runs jobs on every rank and makes the rows; rank 0 prints and writes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks import ceiling, records
from benchmarks.align import Aligner
from benchmarks.compare import wrong_calls
from benchmarks.model import bound
from benchmarks.ours import Ours
from benchmarks.peers import PEERS
from benchmarks.processes import World
from benchmarks.routing import Traffic, measure_traffic
from benchmarks.suites import Job
from benchmarks.systems import CASES, Inputs, System
from benchmarks.timing import Call, Clock, CudaClock, Times

Made = TypeVar("Made")


@dataclass(frozen=True)
class Settings:
    """How to run, and where the rows go."""

    backend: str
    ranks_per_node: int | None = None
    hop: str = "auto"
    iterations: int = 30
    budget_secs: float | None = None
    out: Path | None = None
    append: bool = False


@dataclass(frozen=True)
class TimedCall:
    system: System
    dtype: str
    registered: bool
    call: Call


@dataclass(frozen=True)
class Run:
    """What the rows of one run share."""

    world: World
    settings: Settings
    clock: Clock
    ceiling_gbps: float | None
    absent: dict[str, str]  # peer -> why it cannot run here
    origin: records.Origin

    def say(self, text: str) -> None:
        if self.world.rank == 0:
            print(text, flush=True)


def measure(world: World, jobs: Sequence[Job], settings: Settings) -> None:
    """All jobs, or as many as begin within the budget. Collective."""
    began = time.monotonic()
    top = ceiling.gpu_ceiling(world)
    near = "intranode" if settings.backend == "internode" else settings.backend
    align = Aligner(world, near) if world.device.type == "cuda" else None
    clock = Clock(world, settings.iterations)
    if align is not None:
        clock = CudaClock(world, settings.iterations, align.wait)
    absent = {name: said for name, (missing, _) in PEERS.items() if (said := missing(world)) is not None}
    notes = sorted({absent[name] for job in jobs for name in job.peers if name in absent})
    origin = records.Origin.here(notes)
    this = Run(world, settings, clock, top, absent, origin)
    this.say(f"{origin.hardware}; {origin.versions}; commit {origin.commit}; {world.size} ranks")
    if world.rank == 0 and settings.out is not None and not settings.append:
        records.write(settings.out, [])
    for number, job in enumerate(jobs):
        is_over = settings.budget_secs is not None and time.monotonic() - began > settings.budget_secs
        if number and world.agree(is_over):
            this.say(f"{len(jobs) - number} of {len(jobs)} jobs left out: {settings.budget_secs:g} s are over.")
            break
        _measure_job(this, job)
    if align is not None:
        align.close()


def _measure_job(this: Run, job: Job) -> None:
    world = this.world
    inputs = Inputs(world, job.shape)
    traffic = measure_traffic(world, job.shape, inputs.idx_TK.cpu())
    this.say(f"\n{job.shape}")
    systems: list[System] = [
        Ours(inputs, this.settings.backend, num_sms, this.settings.ranks_per_node, this.settings.hop)
        for num_sms in job.num_sms
    ]
    for name in job.peers:
        if name not in this.absent:
            made = _attempt(this, name, lambda name=name: PEERS[name][1](inputs))  # type: ignore[misc]
            systems += [] if made is None else [made]
    for case in job.cases:
        calls = _calls(this, job, case, systems)
        figures = this.clock.measure([timed.call for timed in calls], job.with_kernels)
        rows = [_record(this, job, traffic, case, *measured) for measured in zip(calls, figures, strict=True)]
        for row in rows:
            this.say(_line(row, job, traffic))
        if world.rank == 0 and this.settings.out is not None:
            records.write(this.settings.out, rows, append=True)
    for system in systems:
        system.close()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _attempt(this: Run, name: str, make: Callable[[], Made]) -> Made | None:
    """What a peer makes; None on all ranks, with the reason, if it fails on any. It must not cost our rows."""
    made, reason = None, ""
    try:
        made = make()
    except Exception as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {error}"
    if not this.world.slowest([float(bool(reason))])[0]:
        return made
    this.say(f"{name} left out: {reason or 'it failed on another rank'}")
    return None


def _calls(this: Run, job: Job, case: str, systems: Sequence[System]) -> list[TimedCall]:
    """What is timed side by side, peers whose rows differ from ours taken out."""
    calls = []
    for system, dtype, registered in product(systems, job.dtypes, job.registered):
        if registered and not system.can_register:
            continue
        arguments = (CASES[case], dtype, registered)
        if isinstance(system, Ours):
            call = system.call(*arguments)
        else:
            call = _attempt(this, system.name, lambda system=system, a=arguments: _tried(system.call(*a)))  # type: ignore[misc]
        if call is not None:
            calls.append(TimedCall(system, dtype, registered, call))
    wrong = wrong_calls(this.world, case, [(timed.dtype, timed.call) for timed in calls])
    for place in sorted(wrong):
        if isinstance(calls[place].system, Ours):
            raise AssertionError(f"{case} in {calls[place].dtype}: rows of moe_ep differ between settings.")  # noqa: TRY004
        this.say(f"{calls[place].system.name} left out of {case} in {calls[place].dtype}: its rows differ from ours.")
    return [timed for place, timed in enumerate(calls) if place not in wrong]


def _tried(call: Call | None) -> Call | None:
    """The call, after it has run once."""
    if call is not None:
        call()
    return call


def _record(this: Run, job: Job, traffic: Traffic, case: str, timed: TimedCall, times: Times) -> records.Record:
    op, layout = CASES[case]
    world, system, shape = this.world, timed.system, job.shape
    remote = traffic.remote_bytes(op, timed.dtype, shape.hidden, system.one_row_a_pair)
    top = this.ceiling_gbps
    if world.device.type == "cpu":
        crossings = 4 if op == "dispatch_combine_fwd_bwd" else 1
        top = ceiling.cpu_ceiling(world, remote // crossings, this.settings.iterations)
    return records.filled(
        world,
        shape,
        times,
        remote,
        top,
        this.origin,
        op=op,
        system=system.name,
        backend=system.backend,
        transport=system.transport,
        nodes=system.nodes,
        layout=layout,
        dtype=timed.dtype,
        num_sms=system.num_sms,
        registered=timed.registered,
    )


def _line(row: records.Record, job: Job, traffic: Traffic) -> str:
    sms = "" if row.num_sms is None else f"{row.num_sms} SMs"
    top = "-" if row.ceiling_gbps is None else f"{row.ceiling_gbps:.2f}"
    extra = "" if row.host_us is None else f", host {row.host_us:.0f} us"
    extra += "" if row.kernel_us is None else f", kernels {row.kernel_us:.0f} us"
    if row.system == "moe_ep":
        limits = bound(row.op, row.layout, row.dtype, job.shape, traffic, row.num_sms, row.registered, row.ceiling_gbps)
        if limits is not None:
            extra += f"; bound by {limits.limit} (link {limits.link_us:.0f}, SMs {limits.sm_us:.0f} us)"
    return (
        f"{row.op:24} {row.layout:12} {row.dtype:8} {row.system:10} {sms:7} {'registered' if row.registered else '':10}"
        f" {row.time_us:10.1f} us (p10 {row.time_us_p10:.1f}, p90 {row.time_us_p90:.1f}), "
        f"{row.remote_bytes / 1e6:.1f} MB remote, {row.gbps:.2f} GB/s of {top}{extra}"
    )
