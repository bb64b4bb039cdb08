"""Lists of jobs: one from the command line, or the one behind the marks, most important first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.routing import Shape
from benchmarks.systems import CASES

SINGLE = ("dispatch", "cached_dispatch", "combine")
BOTH = (False, True)


@dataclass(frozen=True)
class Job:
    """What is measured side by side on one shape: every case, in every dtype, by every budget and peer."""

    shape: Shape
    dtypes: tuple[str, ...]
    num_sms: tuple[int | None, ...]
    registered: tuple[bool, ...]
    cases: tuple[str, ...]
    peers: tuple[str, ...]
    with_kernels: bool = False


DEEPSEEK_V3 = Shape(tokens=4096, hidden=7168, num_experts=256, topk=8, routing="uniform")
GPU_PEERS = ("deep_ep", "deep_ep+te", "nccl", "torch_symm")


def marks() -> Iterator[Job]:
    """Rows behind the marks table and its picture."""
    every = tuple(name for name in CASES if name != "dispatch_combine_fwd_bwd")
    base = Job(DEEPSEEK_V3, ("bfloat16", "fp8"), (8, 16, 24, 32), BOTH, every, GPU_PEERS)
    yield base
    moved = replace(
        base,
        dtypes=("bfloat16",),
        num_sms=(16, 24),
        cases=("cached_dispatch", "combine"),
        peers=("deep_ep", "nccl"),
    )
    for tokens in (8192, 2048, 512, 128, 32768):
        yield replace(moved, shape=replace(DEEPSEEK_V3, tokens=tokens))
    yield replace(moved, shape=replace(DEEPSEEK_V3, routing="zipf1.0"))
    yield replace(moved, num_sms=(4, 12, 20, 48), peers=())
    for hidden, topk in product((7168, 4096, 2048), (8, 2)):
        if (hidden, topk) != (7168, 8):
            yield replace(moved, shape=replace(DEEPSEEK_V3, hidden=hidden, topk=topk))
    yield replace(moved, dtypes=base.dtypes, with_kernels=True)  # the last, for what a profiler leaves behind
