"""Bandwidth against SM count and against tokens, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.marks import BASE, matches
from benchmarks.records import Row

COLOURS = {("cached_dispatch", "bfloat16"): "C0", ("cached_dispatch", "fp8"): "C1", ("combine", "bfloat16"): "C2"}
PEER_MARKERS = {"deep_ep": "s", "nccl": "^", "torch_symm": "v"}
TOKENS_SMS = {False: 24, True: 16}  # the budget at which curves over tokens are drawn, by registered
_ANY_TOKENS = {key: value for key, value in BASE.items() if key != "tokens"}


def draw(rows: Sequence[Row], path: Path) -> str:
    """Draws the picture, or says why not; either way the sentence to print."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return f"No picture: matplotlib is not installed; install it and run marks.py with --png {path} again."
    shows_tokens = len({row["tokens"] for row in rows if matches(row, _ANY_TOKENS)}) > 1
    figure, panels = pyplot.subplots(1, 1 + shows_tokens, figsize=(14, 5.2), sharey=True, squeeze=False)
    left = panels[0, 0]
    drawn = _against_sms(left, rows) + (_against_tokens(panels[0, 1], rows) if shows_tokens else 0)
    if not drawn:
        pyplot.close(figure)
        return "No picture: no row of cached_dispatch or combine on two GPUs."
    ceilings = [row["ceiling_gbps"] for row in rows if matches(row, {"gpus": 2, "world": 2}) and row["ceiling_gbps"]]
    for axes in panels[0]:
        if ceilings:
            axes.axhline(max(ceilings), color="black", linestyle=":", label="copy engine, both directions")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    known = {label: line for axes in panels[0] for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(known.values()), list(known), loc="center right", fontsize=8, handlelength=4)
    left.set_ylabel("GB/s a direction, remote bytes over the whole call")
    figure.suptitle(f"{rows[0]['hardware']}, H=7168, E=256, K=8, two ranks, commit {rows[0]['commit']}", fontsize=10)
    figure.tight_layout(rect=(0, 0, 0.78, 1))  # the legend stands beside the panels
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return f"Picture: {path}"


def _against_sms(axes: Any, rows: Sequence[Row]) -> int:
    axes.set_xlabel("SMs")
    axes.set_title("4096 tokens a rank", fontsize=9)
    drawn = _curves(axes, [row for row in rows if matches(row, BASE)], "num_sms")
    for system, marker in PEER_MARKERS.items():
        for row in rows:
            colour = COLOURS.get((str(row.get("op")), str(row.get("dtype"))))
            if colour and row.get("layout") == "compact" and matches(row, {**BASE, "system": system}):
                label = f"{row['op']} {row['dtype']}, {system}"
                if row["num_sms"] is None:
                    axes.axhline(row["gbps"], color=colour, linestyle="-.", linewidth=0.8, label=label)
                else:
                    axes.plot([row["num_sms"]], [row["gbps"]], marker, color=colour, label=label)
                drawn += 1
    return drawn


def _against_tokens(axes: Any, rows: Sequence[Row]) -> int:
    axes.set_xlabel("tokens a rank")
    axes.set_xscale("log", base=2)
    axes.set_title("24 SMs, 16 where the input is registered", fontsize=9)
    ours = [row for row in rows if matches(row, _ANY_TOKENS) and row["num_sms"] == TOKENS_SMS[row["registered"]]]
    drawn = _curves(axes, ours, "tokens")
    for system, marker in PEER_MARKERS.items():
        theirs = [row for row in rows if matches(row, {**_ANY_TOKENS, "system": system})]
        drawn += _curves(axes, theirs, "tokens", f", {system}", marker, linestyle=":")
    return drawn


def _curves(
    axes: Any, rows: Sequence[Row], x: str, suffix: str = "", marker: str = "o", linestyle: str | None = None
) -> int:
    """One curve for each (op, dtype, registered) of compact rows."""
    drawn = 0
    for (op, dtype), colour in COLOURS.items():
        for registered in (False, True):
            columns = {"op": op, "dtype": dtype, "registered": registered, "layout": "compact"}
            points = sorted((row[x], row["gbps"]) for row in rows if matches(row, columns) and row[x] is not None)
            if not points or (len(points) < 2 and linestyle):
                continue
            style = linestyle or ("-" if registered else "--")
            label = f"{op} {dtype}{', registered' if registered else ''}{suffix}"
            axes.plot(*zip(*points, strict=True), style, marker=marker, markersize=3, color=colour, label=label)
            drawn += 1
    return drawn
