"""How a call is timed, the same way for every system.

Whole calls, in turn over the calls that are compared. On CUDA an iteration puts on the stream: a pause, in which the
host runs ahead, a write of 256 MiB, which empties the L2 cache, a barrier of the devices, an event, the call, an event.
A call that waits for the device on the host pays for the launches behind its wait, one that does not pays for none.
A figure is the time of the slowest rank in each iteration; the median and the tenths are over iterations.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.processes import World

Call = Callable[[], Any]
WARMUP = 5
HOST_ITERATIONS = 10
KERNEL_ITERATIONS = 5
FLUSH_BYTES = 256 * 2**20
PAUSE_CYCLES = 1_000_000  # about 0.5 ms


@dataclass(frozen=True)
class Times:
    """Microseconds."""

    median: float
    p10: float
    p90: float
    host: float | None
    kernel: float | None


def percentiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, p10 and p90 of at least two samples."""
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return statistics.median(samples), tenths[0], tenths[-1]


class Clock:
    """Times calls that every rank makes in the same order; on CPU by the wall, each call behind a barrier."""

    def __init__(self, world: World, iterations: int) -> None:
        self.world = world
        self.iterations = iterations

    def measure(self, calls: Sequence[Call], with_kernels: bool = False) -> list[Times]:
        """One figure a call, taken in turn; with `Times.kernel` from a profile where there is one. Collective.

        A profiler may slow down what is launched after it, so profile last.
        """
        for call in calls:
            for _ in range(WARMUP if self.world.device.type == "cuda" else 1):
                call()
        samples = self._samples(calls)
        figures = []
        for call, own in zip(calls, samples, strict=True):
            figures.append(Times(*percentiles(self.world.slowest(own)), self._host_us(call), None))
        if with_kernels:
            kernels = [self._kernel_us(call) for call in calls]
            return [replace(figure, kernel=kernel) for figure, kernel in zip(figures, kernels, strict=True)]
        return figures

    def _samples(self, calls: Sequence[Call]) -> list[list[float]]:
        samples: list[list[float]] = [[] for _ in calls]
        for _ in range(self.iterations):
            for call, times in zip(calls, samples, strict=True):
                self.world.meet()
                began = time.perf_counter()
                call()
                times.append((time.perf_counter() - began) * 1e6)
        return samples

    def _host_us(self, call: Call) -> float | None:
        return None  # on CPU it is the time itself

    def _kernel_us(self, call: Call) -> float | None:
        return None


class CudaClock(Clock):
    """By events on the current stream.

    Args:
        world: this rank.
        iterations: samples a call.
        align: puts a barrier of the devices on the current stream.
    """

    def __init__(self, world: World, iterations: int, align: Call) -> None:
        super().__init__(world, iterations)
        self._align = align
        self._flushed: Tensor = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=world.device)

    def _samples(self, calls: Sequence[Call]) -> list[list[float]]:
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
        for _ in range(self.iterations):
            for call, marks in zip(calls, events, strict=True):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(PAUSE_CYCLES)
                self._flushed.zero_()
                self._align()
                begin.record()
                call()
                end.record()
                marks.append((begin, end))
        torch.cuda.synchronize()
        return [[begin.elapsed_time(end) * 1e3 for begin, end in marks] for marks in events]

    def _host_us(self, call: Call) -> float | None:
        times = []
        for _ in range(HOST_ITERATIONS):
            torch.cuda.synchronize()
            self.world.meet()
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize()
        return self.world.slowest([statistics.median(times)])[0]

    def _kernel_us(self, call: Call) -> float | None:
        if self.world.gpus < self.world.size:
            return None  # a profile of one rank would hold the others' kernels too
        self.world.meet()
        spans = device_spans(call, KERNEL_ITERATIONS)
        total = sum(end - begin for _, begin, end in spans) / KERNEL_ITERATIONS
        slowest = self.world.slowest([total])[0]
        return slowest or None


Span = tuple[str, float, float]  # kernel, begin and end in microseconds


def device_spans(call: Call, iterations: int) -> list[Span]:
    """What ran on this rank's GPU during `iterations` calls back to back, copies and fills included.

    One more call before them is left out: in it ranks wait for each other's profiler.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda._sleep(1)  # marks where the others begin
        for _ in range(iterations):
            call()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type.name == "CUDA"
    ]
    return behind_mark(spans)


def behind_mark(spans: Sequence[Span]) -> list[Span]:
    """Those that begin after the first kernel of `torch.cuda._sleep`; all if there is none."""
    mark = min((end for name, _, end in spans if "spin_kernel" in name), default=float("-inf"))
    return [span for span in spans if span[1] >= mark]
