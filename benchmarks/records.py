"""One JSON line a figure, always with the same keys, so that files of different runs can be put side by side."""

from __future__ import annotations

import datetime
import json
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import World
from benchmarks.routing import Shape
from benchmarks.timing import Times

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]  # a record as it comes out of a file


@dataclass(frozen=True, kw_only=True)
class Record:
    """A measured figure. Times in microseconds of the slowest rank; bytes that really cross a link.

    Attributes:
        op, system, backend, transport, layout, dtype, routing: what ran, on what.
        world, nodes, gpus: ranks, nodes, and GPUs that the ranks shared (0 on CPU).
        tokens, hidden, num_experts, topk: tokens a rank, and the sizes of the layer.
        num_sms: SM budget, the sum over what may run at once; None where the system has none to set.
        registered: the input lay in memory that peers can read.
        time_us, time_us_p10, time_us_p90: a whole call on the device, median and tenths.
        host_us: until the Python call returns.
        kernel_us: sum of the call's kernel times, waits for peers inside them included.
        remote_bytes: the most that a rank sends or receives over the link.
        gbps, ceiling_gbps: remote_bytes / time_us; what bare copies reach in the same run, a direction (None on one
            GPU, where nothing crosses a link).
    """

    op: str
    system: str
    backend: str
    transport: str
    layout: str
    dtype: str
    world: int
    nodes: int
    gpus: int
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
    ceiling_gbps: float | None
    hardware: str
    versions: str
    commit: str


@dataclass(frozen=True)
class Origin:
    """Where and with what a run's figures were measured; asked once a run, since it starts processes."""

    hardware: str
    versions: str
    commit: str

    @classmethod
    def here(cls, peers: Iterable[str] = ()) -> Origin:
        return cls(hardware(), versions(peers), commit())


def filled(
    world: World,
    shape: Shape,
    times: Times,
    remote_bytes: int,
    ceiling_gbps: float | None,
    origin: Origin,
    nodes: int = 1,
    **own: Any,
) -> Record:
    """A record; `own` has the columns that neither the sizes nor the times nor the run decide."""
    return Record(
        world=world.size,
        nodes=nodes,
        gpus=world.gpus,
        tokens=shape.tokens,
        hidden=shape.hidden,
        num_experts=shape.num_experts,
        topk=shape.topk,
        routing=shape.routing,
        time_us=round(times.median, 1),
        time_us_p10=round(times.p10, 1),
        time_us_p90=round(times.p90, 1),
        host_us=None if times.host is None else round(times.host, 1),
        kernel_us=None if times.kernel is None else round(times.kernel, 1),
        remote_bytes=remote_bytes,
        gbps=round(remote_bytes / times.median / 1e3, 3) if times.median else 0.0,
        ceiling_gbps=None if ceiling_gbps is None else round(ceiling_gbps, 3),
        hardware=origin.hardware,
        versions=origin.versions,
        commit=origin.commit,
        **own,
    )


def hardware() -> str:
    """The GPUs, or the processor and the number of cores."""
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


def versions(peers: Iterable[str] = ()) -> str:
    """Python, torch, CUDA, driver, and one entry a peer, as "deep_ep not installed"."""
    parts = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    if torch.cuda.is_available():
        parts += [f"CUDA {torch.version.cuda}", f"driver {_driver()}"]
    return ", ".join([*parts, *peers])


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return ran.stdout.splitlines()[0].strip() if ran.stdout.strip() else "unknown"


def commit() -> str:
    """The commit that is checked out, with a + where files have changed since."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def default_path(topic: str, of: str | None = None) -> Path:
    """benchmarks/results/<topic>-<hardware>-<date>.jsonl."""
    slug = re.sub(r"[^a-z0-9]+", "-", (of or hardware()).lower()).strip("-")
    return RESULTS / f"{topic}-{slug}-{datetime.date.today().isoformat()}.jsonl"


def write(path: Path, records: Sequence[Record], append: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w") as file:
        file.writelines(json.dumps(asdict(record)) + "\n" for record in records)


def read(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: a line that is no JSON object; the sentence names it.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {path} is no JSON object; the file must hold one record a line.")  # noqa: TRY004
        rows.append(row)
    return rows
