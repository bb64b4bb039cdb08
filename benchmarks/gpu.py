"""`make bench-gpu`: the rows, the layer, the table of marks and the picture, bounded in time.

    python benchmarks/gpu.py [--out FILE.jsonl] [--secs 350]

Each step runs in a process of its own with a limit, so that one which hangs costs its rows and no more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records

HERE = Path(__file__).resolve().parent
SECS = 350.0
LEAST_SECS = 10.0  # less is left: the step does not begin
END_SECS = 15.0
START_SECS = 45.0  # of a step: processes, ceiling, its longest job once the budget is over


def run_step(name: str, command: Sequence[str], limit_secs: float) -> bool:
    """Whether the step ran to its end with exit code 0; says so if not."""
    if limit_secs < LEAST_SECS:
        print(f"{name} left out: no time is left.", flush=True)
        return False
    print(f"\n== {name}", flush=True)
    process = subprocess.Popen(command, start_new_session=True, env={**os.environ, "PYTHON": sys.executable})
    try:
        code = process.wait(timeout=limit_secs)
    except subprocess.TimeoutExpired:
        _end(process)
        print(f"{name} was ended after {limit_secs:.0f} s; what it wrote until then stays.", flush=True)
        return False
    except KeyboardInterrupt:
        _end(process)
        raise
    if code:
        print(f"{name} failed with exit code {code}.", flush=True)
    return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the step and the ranks that it started, which are a session of their own; MPS gets time to quit."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_SECS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/ep-<hardware>-<date>.jsonl")
    parser.add_argument("--secs", type=float, default=SECS, help="limit of the whole run")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench-gpu: needs a CUDA GPU that PyTorch can use, better two; nothing was measured.")
        return 0
    deadline: float = time.monotonic() + args.secs
    out: Path = args.out or records.default_path("ep")
    out.unlink(missing_ok=True)
    num_gpus = torch.cuda.device_count()
    worlds = ["1"] if num_gpus == 1 else ["1", "2"]
    to_out = ["--device", "cuda", "--out", str(out), "--append"]

    def left() -> float:
        return deadline - time.monotonic()

    budget = max(LEAST_SECS, 0.5 * args.secs - START_SECS)
    exchange = [sys.executable, str(HERE / "ep.py"), *to_out]
    ep = [*exchange, "--world", "2", "--suite", "marks", "--budget-secs", f"{budget:.0f}"]
    layer = [sys.executable, str(HERE / "layer.py"), *to_out, "--worlds", *worlds]
    latency = [sys.executable, str(HERE / "low_latency.py"), "--out", str(out), "--append", "--iterations", "30"]
    latency += ["--png", str(out.with_name(f"{out.stem}-low-latency.png"))]
    mps = str(HERE.parent / "scripts" / "with_mps.sh")
    if num_gpus == 1:
        ep = [mps, *ep]
    shared = [mps, *exchange, "--world", "8", "--tokens", "512", "--num-sms", "8"]
    good = run_step("dispatch and combine, 2 ranks", ep, min(left(), budget + START_SECS))
    good &= run_step("MoELayer", layer, min(left() - 20, 120))
    if num_gpus > 1:  # a grid has to find room as a whole, so ranks that share a GPU would wait for each other
        good &= run_step("low latency, 2 ranks", latency, min(left() - 20, 60))
    good &= run_step(f"8 ranks on {num_gpus} GPUs: correct rows, no mark", shared, min(left() - 10, 60))
    if not out.exists():
        print("No row was measured.")
        return 1
    run_step("marks", [sys.executable, str(HERE / "marks.py"), str(out), "--png", str(out.with_suffix(".png"))], 60)
    print(f"Rows: {out}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
