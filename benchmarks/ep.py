"""Times dispatch + combine, forward and backward, beside the same job written plainly.

    python benchmarks/ep.py --device cpu [--world 2] [--tokens 2048] [--hidden 1024] [--num-experts 32] [--topk 4]

The two run in turn, each iteration behind a barrier; a figure is the time of the slowest rank, the table shows medians.
The ceiling is one bare all-to-all of as many remote bytes as a rank sends in a dispatch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import moe_ep
from benchmarks import records
from benchmarks.peers import plain


def _moe_ep_step(buffer: moe_ep.Buffer, x: Tensor, idx: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=num_experts)
    return moe_ep.combine(buffer, out.x, out.handle, out.topk_weights)


def _timed(step: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor) -> float:
    """Microseconds of forward and backward on the slowest rank."""
    for leaf in leaves:
        leaf.grad = None
    dist.barrier()
    began = time.perf_counter()
    step().backward(dy)
    took = torch.tensor((time.perf_counter() - began) * 1e6, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def _ceiling_gbps(remote_bytes: int, iterations: int) -> float:
    """GB/s a direction of one bare all-to-all in which a rank sends `remote_bytes` to the others."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        return 0.0
    counts = [0 if peer == rank else remote_bytes // (world - 1) for peer in range(world)]
    send, recv = torch.zeros(sum(counts), dtype=torch.uint8), torch.empty(sum(counts), dtype=torch.uint8)
    times = []
    for _ in range(iterations):
        dist.barrier()
        began = time.perf_counter()
        dist.all_to_all_single(recv, send, counts, counts)
        times.append(time.perf_counter() - began)
    return sum(counts) / statistics.median(times) / 1e9


def _measure(rank: int, port: int, args: argparse.Namespace, out: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.world)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(args.tokens, args.hidden, generator=g, requires_grad=True)
    idx = torch.rand(args.tokens, args.num_experts, generator=g).argsort(1)[:, : args.topk].contiguous()
    weights = torch.rand(args.tokens, args.topk, generator=g, requires_grad=True)
    dy = torch.randn(args.tokens, args.hidden, generator=g)
    buffer = moe_ep.Buffer(dist.group.WORLD)
    group = dist.group.WORLD
    assert group is not None
    steps: dict[str, Callable[[], Tensor]] = {
        "moe_ep": lambda: _moe_ep_step(buffer, x, idx, weights, args.num_experts),
        "plain": lambda: plain.dispatch_combine(group, x, idx, weights, args.num_experts),
    }
    leaves = [x, weights]
    results = {}
    for name, step in steps.items():
        _timed(step, leaves, dy)
        results[name] = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    for ours, theirs in zip(*results.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.iterations):
        for name, step in steps.items():
            times[name].append(_timed(step, leaves, dy))
    owner = idx // (args.num_experts // args.world)
    remote_rows = sum(int((owner == peer).any(1).sum()) for peer in range(args.world) if peer != rank)
    remote_pairs = int((owner != rank).sum())
    row_bytes = args.hidden * x.element_size()
    remote = {"moe_ep": remote_rows * row_bytes, "plain": remote_pairs * row_bytes}
    sent = torch.tensor([remote["moe_ep"]])
    dist.all_reduce(sent, op=dist.ReduceOp.MAX)  # the bare all-to-all needs equal counts
    ceiling = _ceiling_gbps(int(sent), args.iterations)
    if rank == 0:
        out.put((times, remote, ceiling))
    dist.barrier()
    buffer.close()
    dist.destroy_process_group()


def _record(name: str, times: list[float], remote: int, ceiling: float, args: argparse.Namespace) -> records.Record:
    tenths = statistics.quantiles(times, n=10)
    median = statistics.median(times)
    crossings = 4  # dispatch and combine, forward and backward
    return records.Record(
        op="dispatch_combine_fwd_bwd",
        system=name,
        backend="torch",
        transport="gloo",
        layout="expert_major",
        dtype="float32",
        world=args.world,
        nodes=1,
        tokens=args.tokens,
        hidden=args.hidden,
        num_experts=args.num_experts,
        topk=args.topk,
        routing="uniform",
        num_sms=None,
        registered=False,
        time_us=round(median, 1),
        time_us_p10=round(tenths[0], 1),
        time_us_p90=round(tenths[-1], 1),
        host_us=None,
        kernel_us=None,
        remote_bytes=crossings * remote,
        gbps=round(crossings * remote / median / 1e3, 3),
        ceiling_gbps=round(ceiling, 3),
        hardware=records.hardware(),
        versions=records.versions(),
        commit=records.commit(),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="where to run")
    parser.add_argument("--world", type=int, default=2, help="ranks, one process each")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a rank")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--num-experts", type=int, default=32)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=30, help="measured repetitions of each job")
    parser.add_argument("--json", type=Path, help="write one JSON line a row to this file")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_measure, args=(rank, port, args, queue)) for rank in range(args.world)]
    for process in ranks:
        process.start()
    times, remote, ceiling = queue.get(timeout=600)
    for process in ranks:
        process.join()
    rows = [_record(name, times[name], remote[name], ceiling, args) for name in times]
    print(f"{rows[0].hardware}; {rows[0].versions}; W={args.world} T={args.tokens} H={args.hidden}")
    for row in rows:
        spread = f"(p10 {row.time_us_p10 / 1e3:.2f}, p90 {row.time_us_p90 / 1e3:.2f})"
        link = f"{row.remote_bytes / 1e6:.1f} MB remote, {row.gbps:.2f} GB/s of {row.ceiling_gbps:.2f}"
        print(f"{row.system:8} {row.time_us / 1e3:8.2f} ms {spread}  {link}")
    print(f"ratio moe_ep / plain: {rows[0].time_us / rows[1].time_us:.3f}")
    if args.json is not None:
        records.write(args.json, rows)


if __name__ == "__main__":
    main()
