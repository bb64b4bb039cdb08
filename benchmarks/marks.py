"""The marks that this project set itself, beside what a run measured.

    python benchmarks/marks.py benchmarks/results/ep-....jsonl [--png FILE]

prints a table: mark, figure, ceiling, SMs, ratio to the peer, and met, missed by how much, or not measured and why.
The picture shows bandwidth against SM count and against tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.records import Row, read

BASE = {"system": "moe_ep", "world": 2, "gpus": 2, "tokens": 4096, "hidden": 7168, "num_experts": 256, "topk": 8}
BASE |= {"routing": "uniform"}
QWEN = {"op": "layer_fwd_bwd", "world": 2, "gpus": 2, "hidden": 2048, "num_experts": 128, "tokens": 16384}
DEEPSEEK = {"op": "layer_fwd_bwd", "world": 2, "gpus": 2, "hidden": 7168, "num_experts": 64, "tokens": 4096}

# DeepEP V1's own benchmark on two H200 at 24 SMs, best of its tuning, microseconds; another run, so no verdict on it.
EARLIER_US = {("cached_dispatch", "bfloat16"): 348, ("cached_dispatch", "fp8"): 244, ("combine", "bfloat16"): 419}


@dataclass(frozen=True)
class Mark:
    """What must hold for the fastest row that has these columns and at most `max_sms` SMs.

    Attributes:
        at_most_us: limit of its time.
        peer, at_least_faster: system and how many times slower it must be on the same job in the same file.
        over, at_most_over_us: columns of another row of ours, and by how much the first may be slower than that.
        half_of: columns of another row of ours, of whose bandwidth this one must have at least a half.
        at_most_host_us: limit of the time until the Python call returns.
    """

    name: str
    columns: Row
    max_sms: int | None = None
    at_most_us: float | None = None
    peer: str | None = None
    at_least_faster: float | None = None
    over: Row = field(default_factory=dict)
    at_most_over_us: float | None = None
    half_of: Row = field(default_factory=dict)
    at_most_host_us: float | None = None


def _ep(op: str, layout: str = "compact", dtype: str = "bfloat16", registered: bool | None = False) -> Row:
    columns = {**BASE, "op": op, "layout": layout, "dtype": dtype}
    return columns if registered is None else {**columns, "registered": registered}


MARKS = (
    Mark("dispatch bf16, handle given", _ep("cached_dispatch"), 24, 205, "deep_ep", 1.7),
    Mark("dispatch bf16, handle given, registered", _ep("cached_dispatch", registered=True), 16, 205, "deep_ep", 1.7),
    Mark("dispatch fp8, handle given", _ep("cached_dispatch", dtype="fp8"), 24, 128, "deep_ep", 1.9),
    Mark(
        "dispatch fp8, handle given, registered",
        _ep("cached_dispatch", dtype="fp8", registered=True),
        16,
        128,
        "deep_ep",
        1.9,
    ),
    Mark("combine bf16", _ep("combine"), 24, 209, "deep_ep", 2.0),
    Mark("combine bf16, registered", _ep("combine", registered=True), 16, 209, "deep_ep", 2.0),
    Mark(
        "dispatch to expert_major (fused permute)",
        _ep("dispatch", "expert_major", registered=None),
        32,
        None,
        "deep_ep+te",
        1 / 0.62,
    ),
    Mark(
        "weighted combine (fused unpermute)",
        _ep("combine", "expert_major", registered=None),
        32,
        None,
        "deep_ep+te",
        1 / 0.65,
    ),
    Mark("first dispatch: layout, counts, host wait", _ep("dispatch"), 24, None, "deep_ep", 1.5),
    Mark(
        "first dispatch over the cached one",
        _ep("dispatch"),
        24,
        over=_ep("cached_dispatch"),
        at_most_over_us=40,
    ),
    Mark(
        "dispatch, 8 SMs: half of 16 SMs, registered",
        {**_ep("cached_dispatch", registered=True), "num_sms": 8},
        half_of={**_ep("cached_dispatch", registered=True), "num_sms": 16},
    ),
    Mark(
        "combine, 8 SMs: half of 16 SMs, registered",
        {**_ep("combine", registered=True), "num_sms": 8},
        half_of={**_ep("combine", registered=True), "num_sms": 16},
    ),
    Mark("host time of a dispatch, handle given", _ep("cached_dispatch"), 24, at_most_host_us=60),
    Mark("host time of a combine", _ep("combine"), 24, at_most_host_us=60),
    Mark("MoELayer forward+backward, Qwen3-30B", {**QWEN, "system": "moe_ep"}, at_most_us=9500),
    Mark("MoELayer forward+backward, DeepSeek-V3 E=64", {**DEEPSEEK, "system": "moe_ep"}, at_most_us=17000),
    Mark("low latency dispatch, 128 tokens", {"system": "moe_ep", "op": "ll_dispatch", "tokens": 128}, at_most_us=25),
    Mark("low latency combine, 128 tokens", {"system": "moe_ep", "op": "ll_combine", "tokens": 128}, at_most_us=34),
)


@dataclass(frozen=True)
class Line:
    """One line of the table, as text."""

    mark: str
    limit: str
    figure: str
    ceiling: str
    sms: str
    peer: str
    verdict: str


def matches(row: Row, columns: Row, max_sms: int | None = None) -> bool:
    if any(row.get(key) != value for key, value in columns.items()):
        return False
    return max_sms is None or (row.get("num_sms") is not None and row["num_sms"] <= max_sms)


def fastest(rows: Sequence[Row], columns: Row, max_sms: int | None = None) -> Row | None:
    """The row with these columns that takes least time."""
    return min((row for row in rows if matches(row, columns, max_sms)), key=lambda row: row["time_us"], default=None)


def judge(mark: Mark, rows: Sequence[Row]) -> Line:
    """The line of a mark."""
    row = fastest(rows, mark.columns, mark.max_sms)
    if row is None:
        return Line(mark.name, _limit(mark), "-", "-", _sms_limit(mark), "-", f"not measured: {_why(mark, rows)}")
    results: list[str] = []
    open_points: list[str] = []
    figure = f"{row['time_us']:.1f} us"
    if mark.at_most_us is not None:
        results += _missed(row["time_us"], mark.at_most_us)
    if mark.at_most_over_us is not None:
        other = fastest(rows, {**mark.over, "num_sms": row["num_sms"]})
        if other is None:
            open_points.append("no row of the cached call with as many SMs")
        else:
            figure = f"+{row['time_us'] - other['time_us']:.1f} us"
            results += _missed(row["time_us"] - other["time_us"], mark.at_most_over_us)
    if mark.half_of:
        other = fastest(rows, mark.half_of)
        if other is None:
            open_points.append("no row with 16 SMs")
        else:
            share = other["time_us"] / row["time_us"]
            figure = f"{share:.0%}"
            results += [] if share >= 0.5 else [f"{(0.5 - share) * 100:.0f} points"]
    if mark.at_most_host_us is not None:
        if row.get("host_us") is None:
            open_points.append("the row has no host time")
        else:
            figure = f"{row['host_us']:.1f} us"
            results += _missed(row["host_us"], mark.at_most_host_us)
    ratio = _ratio(mark, row, rows)
    if mark.at_least_faster is not None:
        if ratio is None:
            open_points.append(_peer_absent(mark.peer, rows))
        elif ratio < mark.at_least_faster:
            results.append(f"{ratio:.2f}x instead of {mark.at_least_faster:.2f}x")
    peer = "-" if mark.peer is None else f"{mark.peer} {_earlier(mark, row) if ratio is None else f'{ratio:.2f}x'}"
    checked = mark.at_most_us is not None or ratio is not None or not open_points
    return Line(
        mark.name, _limit(mark), figure, _ceiling(row), _sms(row), peer, _verdict(results, open_points, checked)
    )


def _missed(value: float, limit: float) -> list[str]:
    return [] if value <= limit else [f"{value - limit:.1f} us ({value / limit - 1:.0%})"]


def _verdict(results: list[str], open_points: list[str], checked: bool) -> str:
    if results:
        verdict = "missed by " + ", ".join(results)
    else:
        verdict = "met" if checked else "not measured"
    if not open_points:
        return verdict
    said = ", ".join(open_points)
    return f"{verdict}: {said}" if verdict == "not measured" else f"{verdict}; not measured: {said}"


def _ratio(mark: Mark, row: Row, rows: Sequence[Row]) -> float | None:
    """How many times longer the peer takes for the same job."""
    if mark.peer is None:
        return None
    columns = {**mark.columns, "system": mark.peer, "registered": False}
    peer = fastest(rows, columns)
    return None if peer is None else float(peer["time_us"] / row["time_us"])


def _earlier(mark: Mark, row: Row) -> str:
    """The ratio to what the peer took in another run, marked as such."""
    known = EARLIER_US.get((str(row["op"]), str(row["dtype"]))) if mark.peer == "deep_ep" else None
    return "-" if known is None or row["layout"] != "compact" else f"({known / row['time_us']:.2f}x)"


def _peer_absent(peer: str | None, rows: Sequence[Row]) -> str:
    """Why there is no row of a peer, as the run noted it beside the versions."""
    for row in rows:
        for part in str(row.get("versions", "")).split(", "):
            if part.startswith(f"{peer} ") or part.startswith(f"{peer}:"):
                return part
    package = (peer or "").split("+")[0]
    return f"no row of {peer} for this job" if package == peer else _peer_absent(package, rows)


def _why(mark: Mark, rows: Sequence[Row]) -> str:
    wanted = str(mark.columns.get("op"))
    if not any(row.get("op") == wanted and row.get("system") == "moe_ep" for row in rows):
        return f"the file has no row of {wanted}"
    gpus = mark.columns.get("gpus")
    if gpus is not None and not any(row.get("gpus") == gpus and row.get("op") == wanted for row in rows):
        return f"the rows of {wanted} were not taken on {gpus} GPUs"
    sms = "" if mark.max_sms is None else f" with at most {mark.max_sms} SMs"
    return f"no row of {wanted} has this shape, input and layout{sms}"


def _limit(mark: Mark) -> str:
    parts = []
    if mark.at_most_us is not None:
        parts.append(f"<= {mark.at_most_us:g} us")
    if mark.at_most_over_us is not None:
        parts.append(f"<= +{mark.at_most_over_us:g} us")
    if mark.half_of:
        parts.append(">= 50%")
    if mark.at_most_host_us is not None:
        parts.append(f"<= {mark.at_most_host_us:g} us")
    if mark.at_least_faster is not None:
        parts.append(f">= {mark.at_least_faster:.2f}x")
    return ", ".join(parts)


def _sms_limit(mark: Mark) -> str:
    return "-" if mark.max_sms is None else f"<= {mark.max_sms}"


def _sms(row: Row) -> str:
    return "-" if row.get("num_sms") is None else str(row["num_sms"])


def _ceiling(row: Row) -> str:
    if not row.get("ceiling_gbps") or not row.get("remote_bytes"):
        return "-"
    return f"{row['gbps']:.0f} of {row['ceiling_gbps']:.0f} GB/s ({row['gbps'] / row['ceiling_gbps']:.0%})"


HEADINGS = Line("mark", "limit", "figure", "ceiling", "SMs", "peer", "verdict")


def table(rows: Sequence[Row]) -> str:
    """All marks as text, one line each."""
    lines = [HEADINGS, *(judge(mark, rows) for mark in MARKS)]
    cells = [[*vars(line).values()] for line in lines]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    note = "A ratio in brackets is to DeepEP V1's own benchmark in an earlier run on two H200 (348, 244 and 419 us)."
    return "\n".join([texts[0], "-" * len(texts[0]), *texts[1:], note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON lines of one run")
    parser.add_argument("--png", type=Path, help="draw bandwidth against SM count and against tokens")
    args = parser.parse_args()
    rows = [row for file in args.files for row in read(file)]
    print(table(rows))
    if args.png is not None:
        from benchmarks.plot import draw

        print(draw(rows, args.png))


if __name__ == "__main__":
    main()
