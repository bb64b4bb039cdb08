"""What bare copies reach: each GPU sends to the next one in a ring, all at once, by the copy engines.

    python benchmarks/ceiling.py [--gpus 2]

prints the GB/s of the slowest direction. With two GPUs that is a copy in both directions at once. It runs in a process
of its own, because it opens a context on every GPU.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.processes import World

COPY_BYTES = 256 * 2**20
COPIES = 16
REPEATS = 5
LIMIT_SECS = 120


def ring_gbps(num_gpus: int) -> float:
    """GB/s a direction of peer-to-peer copies around a ring of `num_gpus` >= 2 GPUs, median of five runs."""
    devices = [torch.device("cuda", index) for index in range(num_gpus)]
    sources = [torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for device in devices]
    targets = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for device in devices]
    streams = [torch.cuda.Stream(device) for device in devices]
    figures = []
    for _ in range(REPEATS + 1):
        events = []
        for index in range(num_gpus):
            with torch.cuda.device(devices[index]), torch.cuda.stream(streams[index]):
                torch.cuda._sleep(2_000_000)  # about 1 ms: all directions begin together
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(COPIES):
                    targets[(index + 1) % num_gpus].copy_(sources[index], non_blocking=True)
                end.record()
                events.append((begin, end))
        for device in devices:
            torch.cuda.synchronize(device)
        slowest_ms = max(begin.elapsed_time(end) for begin, end in events)
        figures.append(COPIES * COPY_BYTES / slowest_ms / 1e6)
    return float(statistics.median(figures[1:]))  # the first one opens the connections


def gpu_ceiling(world: World) -> float | None:
    """The figure for this run's GPUs, taken by rank 0 while the others wait; None on one GPU. Collective."""
    if world.gpus < 2:
        return None
    figure = 0.0
    if world.rank == 0:
        command = [sys.executable, str(Path(__file__).resolve()), "--gpus", str(world.gpus)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_SECS)
            figure = float(ran.stdout)
        except (subprocess.SubprocessError, ValueError) as error:
            said = getattr(error, "stderr", None) or error
            print(f"The ceiling was not measured: {said}", file=sys.stderr)
    return world.slowest([figure])[0] or None


def cpu_ceiling(world: World, remote_bytes: int, iterations: int) -> float | None:
    """GB/s a direction of one bare all-to-all in which a rank sends `remote_bytes` to the others. Collective."""
    if world.size == 1:
        return None
    counts = [0 if peer == world.rank else remote_bytes // (world.size - 1) for peer in range(world.size)]
    send, recv = torch.zeros(sum(counts), dtype=torch.uint8), torch.empty(sum(counts), dtype=torch.uint8)
    times = []
    for _ in range(iterations):
        world.meet()
        began = time.perf_counter()
        dist.all_to_all_single(recv, send, counts, counts)
        times.append(time.perf_counter() - began)
    return world.slowest([sum(counts) / statistics.median(times) / 1e9])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    num_gpus = parser.parse_args().gpus
    if min(num_gpus, torch.cuda.device_count()) < 2:
        raise SystemExit(f"a ceiling needs two GPUs; PyTorch finds {torch.cuda.device_count()}.")
    print(f"{ring_gbps(num_gpus):.1f}")


if __name__ == "__main__":
    main()
