"""One JSON line a figure, always with the same keys, so that files of different runs can be put side by side."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class Record:
    """A measured figure. Times in microseconds of the slowest rank; bytes that really cross a link."""

    op: str
    system: str
    backend: str
    transport: str
    layout: str
    dtype: str
    world: int
    nodes: int
    tokens: int
    hidden: int
    num_experts: int
    topk: int
    routing: str
    num_sms: int | None
    registered: bool
    time_us: float
    time_us_p10: float
    time_us_p90: float
    host_us: float | None
    kernel_us: float | None
    remote_bytes: int
    gbps: float
    ceiling_gbps: float
    hardware: str
    versions: str
    commit: str


def hardware() -> str:
    """The GPU, or the processor and the number of cores."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        return f"{len(names)} cores of {names[0]}" if names else model
    return model


def versions() -> str:
    return f"python {platform.python_version()}, torch {torch.__version__}"


def commit() -> str:
    """The commit that is checked out, with a + where files have changed since."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def write(path: Path, records: Sequence[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records))
