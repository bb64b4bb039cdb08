"""Where the time of a step goes, from the kernels that ran in it.

A moment belongs to the first of these that has a kernel running then: GEMM, exchange, the rest (permutation and
element-wise work, copies, fills); a moment without any is a gap. So the four parts add up to the span, and an exchange
counts only where no GEMM hides it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.timing import Span

GEMM = re.compile(r"gemm|cutlass|nvjet|cublas|xmma|wgmma|grouped_mm|matmul", re.IGNORECASE)
OWN = re.compile(r"(void )?moe_ep")  # kernels of csrc ...
OWN_ELEMENTWISE = re.compile(
    r"swiglu|gelu|topk|route|score|cast|activation|fp8_tile|fp8_pack", re.IGNORECASE
)  # ... that do not exchange
EXCHANGE = re.compile(r"nccl|deep_ep|nvshmem|symm_mem", re.IGNORECASE)


def kind(kernel: str) -> str:
    """ "gemm", "exchange" or "other", by the name of a kernel."""
    if OWN.match(kernel):
        name = re.split(r"[<(]", kernel.replace("(anonymous namespace)::", ""), maxsplit=1)[0]
        return "other" if OWN_ELEMENTWISE.search(name) else "exchange"
    if EXCHANGE.search(kernel):
        return "exchange"
    return "gemm" if GEMM.search(kernel) else "other"


def covered(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one of them runs."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted((begin, end) for _, begin, end in spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class Breakdown:
    """Microseconds of one step; `hidden` is exchange behind GEMMs, which counts as GEMM."""

    gemm: float
    exchange: float
    other: float
    gaps: float
    num_kernels: float
    hidden: float

    @property
    def total(self) -> float:
        return self.gemm + self.exchange + self.other + self.gaps


def break_down(spans: Sequence[Span], iterations: int) -> Breakdown | None:
    """Of `iterations` steps that followed one another; None where nothing was recorded."""
    if not spans:
        return None
    gemm = covered(span for span in spans if kind(span[0]) == "gemm")
    moved = covered(span for span in spans if kind(span[0]) in ("gemm", "exchange"))
    hidden = covered(span for span in spans if kind(span[0]) == "exchange") - (moved - gemm)
    busy = covered(spans)
    whole = max(end for *_, end in spans) - min(begin for _, begin, _ in spans)
    parts = (gemm, moved - gemm, busy - moved, whole - busy, len(spans), hidden)
    return Breakdown(*(part / iterations for part in parts))


def longest(spans: Sequence[Span], iterations: int, count: int) -> list[tuple[str, float, float]]:
    """(kernel, microseconds a step, launches a step) of the kernels that take most."""
    times: dict[str, list[float]] = {}
    for name, begin, end in spans:
        times.setdefault(name, []).append(end - begin)
    rows = [(name, sum(each) / iterations, len(each) / iterations) for name, each in times.items()]
    return sorted(rows, key=lambda row: -row[1])[:count]
