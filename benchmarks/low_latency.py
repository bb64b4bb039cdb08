"""Times the low-latency calls: dispatch in FP8, combine in bfloat16, in graph replay, beside DeepEP V1 if it is there.

    python benchmarks/low_latency.py                                       two ranks, 1 to 256 tokens, the whole suite
    python benchmarks/low_latency.py --tokens 128 --out FILE.jsonl --png FILE.png
    python benchmarks/low_latency.py --hop nvshmem --ranks-per-node 1 --put   ranks that stand for nodes; rows are put

Rows: `ll_dispatch`, `ll_combine`: a graph of one call, behind a barrier of the devices and an emptied L2 cache, as all
other rows (benchmarks/timing.py), with the kernel's own time beside. `..._steady`: a graph of eight calls, divided; the
only one for DeepEP V1, whose graphs must hold an even number of calls. `..._hook`: send and receive together, with a
GEMM between them; `gemm_alone` and `gemm_between_hooks` are that GEMM.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import moe_ep
from benchmarks import records
from benchmarks.align import Aligner
from benchmarks.ceiling import gpu_ceiling
from benchmarks.low_latency_peer import DeepEpLowLatency, missing
from benchmarks.low_latency_plot import draw
from benchmarks.processes import World, run
from benchmarks.routing import Shape, choose, owners
from benchmarks.timing import FLUSH_BYTES, PAUSE_CYCLES, Call, CudaClock, Times, percentiles
from moe_ep.backends import internode_low_latency

TOKENS = (1, 8, 32, 64, 128, 256)
LEAST_MAX = 128  # M
STEADY_CALLS = 8
GEMM = (4096, 7168, 4096)  # M, K, N: longer than a call takes to travel


class Job:
    """The inputs of one number of tokens, and our calls on them."""

    def __init__(self, world: World, shape: Shape, buffer: moe_ep.Buffer, num_max: int) -> None:
        self.world, self.shape, self.buffer, self.num_max = world, shape, buffer, num_max
        g = torch.Generator().manual_seed(2000 + world.rank)
        self.x = torch.randn(shape.tokens, shape.hidden, generator=g).bfloat16().to(world.device)
        self.idx = choose(shape, world.rank).to(world.device)
        self.weights = torch.rand(shape.tokens, shape.topk, generator=g).to(world.device)
        result = self.dispatch()
        self.handle = result[2]
        rows = torch.randn(*self.handle.shape, device=world.device, dtype=torch.bfloat16)
        self.rows = buffer.get_next_low_latency_combine_buffer(self.handle).copy_(rows)

    def dispatch(self, hook: bool = False) -> Any:
        return self.buffer.low_latency_dispatch(
            self.x, self.idx, self.num_max, self.shape.num_experts, return_recv_hook=hook
        )

    def combine(self, hook: bool = False) -> Any:
        return self.buffer.low_latency_combine(self.rows, self.idx, self.weights, self.handle, return_recv_hook=hook)

    def remote_bytes(self, op: str) -> int:
        """The most that a rank sends or receives over the link: a row a (token, expert) pair."""
        hidden, world = self.shape.hidden, self.world.size
        row_bytes = hidden + hidden // 128 * 4 if op == "ll_dispatch" else 2 * hidden
        owner = owners(self.shape.num_experts, world)
        goes = [torch.bincount(owner[choose(self.shape, rank)].flatten(), minlength=world) for rank in range(world)]
        table = torch.stack(goes)
        table.fill_diagonal_(0)
        return int(torch.stack([table.sum(0), table.sum(1)]).max()) * row_bytes


def graph_of(call: Call, num_calls: int) -> Call:
    """Replays a graph of so many calls."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            kept.append(call())

    def replay() -> list[Any]:
        graph.replay()
        return kept

    return replay


def divided(times: Times, by: int) -> Times:
    return Times(times.median / by, times.p10 / by, times.p90 / by, None, None)


def hooked(
    job: Job, align: Call, iterations: int, call: Callable[[bool], Any]
) -> tuple[list[float], list[float], list[float]]:
    """Microseconds of send + receive, of the GEMM between them, and of the GEMM alone."""
    rows, inner, columns = GEMM
    a = torch.randn(rows, inner, device=job.world.device, dtype=torch.bfloat16)
    b = torch.randn(inner, columns, device=job.world.device, dtype=torch.bfloat16)
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=job.world.device)
    marks = []
    for _ in range(iterations + 3):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
        torch.cuda._sleep(PAUSE_CYCLES)
        flushed.zero_()
        align()
        events[0].record()
        hook = call(True)[-1]
        events[1].record()
        a @ b
        events[2].record()
        hook()
        events[3].record()
        events[4].record()
        a @ b
        events[5].record()
        marks.append(events)
    torch.cuda.synchronize()
    spans = [[events[i].elapsed_time(events[i + 1]) * 1e3 for i in (0, 1, 2, 4)] for events in marks[3:]]
    return [send + receive for send, _, receive, _ in spans], [gemm for _, gemm, _, _ in spans], [s[3] for s in spans]


class Report:
    """Makes the rows, prints and keeps them."""

    def __init__(self, world: World, out: Path | None, append: bool, transport: str, nodes: int) -> None:
        self.world, self.out, self.transport, self.nodes = world, out, transport, nodes
        self.ceiling_gbps = gpu_ceiling(world)
        note = missing(world)
        self.origin = records.Origin.here([note] if note else [])
        self.rows: list[records.Record] = []
        if world.rank == 0 and out is not None:
            records.write(out, [], append)

    def add(self, job: Job, op: str, times: Times, system: str = "moe_ep") -> None:
        base = op.removesuffix("_steady").removesuffix("_hook")
        remote = job.remote_bytes(base) if base.startswith("ll_") else 0
        row = records.filled(
            self.world,
            job.shape,
            times,
            remote,
            self.ceiling_gbps,
            self.origin,
            op=op,
            system=system,
            backend=job.buffer.backend_name if system == "moe_ep" else "v1",
            transport=self.transport if system == "moe_ep" else "nvlink",
            nodes=self.nodes if system == "moe_ep" else 1,
            layout="expert_major",
            dtype="fp8" if base == "ll_dispatch" else "bfloat16",
            num_sms=None,
            registered=False,
        )
        self.rows.append(row)
        if self.world.rank == 0:
            extra = "" if row.kernel_us is None else f", kernels {row.kernel_us:.1f} us"
            print(
                f"{row.tokens:4} tokens  {op:20} {system:8} {row.time_us:8.1f} us (p10 {row.time_us_p10:.1f}, p90 "
                f"{row.time_us_p90:.1f}), {row.gbps:.0f} GB/s{extra}",
                flush=True,
            )
            if self.out is not None:
                records.write(self.out, [row], append=True)


def measure(world: World, args: argparse.Namespace) -> None:
    """All rows. Collective."""
    align = Aligner(world, "intranode")
    clock = CudaClock(world, args.iterations, align.wait)
    nodes = 1 if args.hop is None else world.size // (args.ranks_per_node or world.size)
    report = Report(world, args.out, args.append, "put" if args.put else "nvlink", nodes)
    most = max(args.tokens)
    peer = None
    if missing(world) is None and args.hop is None:
        peer = DeepEpLowLatency(world, max(LEAST_MAX, most), args.hidden, args.num_experts)
    with open_buffer(world, args) as buffer:

        def job_of(tokens: int) -> Job:
            shape = Shape(tokens, args.hidden, args.num_experts, args.topk, "uniform")
            return Job(world, shape, buffer, max(LEAST_MAX, tokens))

        check_sums(job_of(most))  # the memory grows to its final size before a graph holds it
        for tokens in args.tokens:
            job = job_of(tokens)
            measure_job(report, clock, align, job, args.iterations)
            if peer is not None:
                for op, call in peer.calls(job.x, job.idx, job.weights, job.num_max):
                    times = clock.measure([graph_of(call, STEADY_CALLS)])[0]
                    report.add(job, f"{op}_steady", divided(times, STEADY_CALLS), "deep_ep")
        buffer.check()
    if peer is not None:
        peer.close()
    align.close()
    if world.rank == 0 and args.png is not None:
        print(draw(report.rows, args.png))


def open_buffer(world: World, args: argparse.Namespace) -> moe_ep.Buffer:
    """Of one node; or between nodes, where a hop is named, which are kept apart by `--put`."""
    if args.hop is None:
        return moe_ep.Buffer(world.group, backend="intranode")
    with mock.patch.object(internode_low_latency, "STORES_ACROSS_NODES", not args.put):
        return moe_ep.Buffer(world.group, backend="internode", hop=args.hop, ranks_per_node=args.ranks_per_node)


def measure_job(report: Report, clock: CudaClock, align: Aligner, job: Job, iterations: int) -> None:
    calls: Sequence[tuple[str, Callable[[bool], Any]]] = (("ll_dispatch", job.dispatch), ("ll_combine", job.combine))
    for op, call in calls:
        report.add(job, op, clock.measure([graph_of(lambda call=call: call(False), 1)], with_kernels=True)[0])  # type: ignore[misc]
        steady = clock.measure([graph_of(lambda call=call: call(False), STEADY_CALLS)])[0]  # type: ignore[misc]
        report.add(job, f"{op}_steady", divided(steady, STEADY_CALLS))
        both, inside, alone = hooked(job, align.wait, iterations, call)
        for name, samples in ((f"{op}_hook", both), ("gemm_between_hooks", inside), ("gemm_alone", alone)):
            report.add(job, name, Times(*percentiles(job.world.slowest(samples)), None, None))
    check_sums(job)


def check_sums(job: Job) -> None:
    """What is timed is right: the rows of a dispatch, sent home, give the tokens times their weights."""
    (rows, scales), _, handle, _, _ = job.dispatch()
    wide = moe_ep.fp8.dequantize_1x128(rows.flatten(0, 1), scales.flatten(0, 1).contiguous()).view(rows.shape)
    y: Tensor = job.buffer.low_latency_combine(wide, job.idx, job.weights, handle)[0]
    expected = job.x.float() * job.weights.sum(1, keepdim=True)
    worst = float((y.float() - expected).abs().max() / expected.abs().max())
    assert worst < 0.1, f"the sums of {job.shape} are off by {worst:.3f} of the largest"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks, one process each; they share GPUs if need be")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="tokens a rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-experts", type=int, default=288)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--hop", choices=["ipc", "nvshmem"], help="between nodes, over this hop (default: in a node)")
    parser.add_argument("--ranks-per-node", type=int, help="with --hop: ranks that stand for a node")
    parser.add_argument("--put", action="store_true", help="with --hop nvshmem: put rows that could be stored")
    parser.add_argument("--out", type=Path, help="JSON lines (default: benchmarks/results/low_latency-...)")
    parser.add_argument("--append", action="store_true", help="keep what the file already holds")
    parser.add_argument("--png", type=Path, help="picture of latency against tokens (default: beside the rows)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("low_latency: needs a CUDA GPU that PyTorch can use, better two; nothing was measured.")
        return
    args.out = args.out or records.default_path("low_latency")
    args.png = args.png or args.out.with_suffix(".png")
    run(measure, args.world, "cuda", args)


if __name__ == "__main__":
    main()
