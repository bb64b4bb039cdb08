"""Latency against tokens, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Record

MARKS_US = {"ll_dispatch": 25.0, "ll_combine": 34.0}  # at 128 tokens
STYLES = {"": "-", "_steady": "--", "_hook": ":"}
COLOURS = {"ll_dispatch": "C0", "ll_combine": "C2"}


def draw(rows: Sequence[Record], path: Path) -> str:
    """Draws the picture, or says why not; either way the sentence to print."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "No picture: matplotlib is not installed."
    figure, axes = pyplot.subplots(figsize=(9, 5.2))
    for op, colour in COLOURS.items():
        for suffix, style in STYLES.items():
            for system, marker in (("moe_ep", "o"), ("deep_ep", "s")):
                line = sorted(
                    (row.tokens, row.time_us) for row in rows if (row.op, row.system) == (op + suffix, system)
                )
                if line:
                    label = f"{op}{suffix}, {system}"
                    axes.plot(*zip(*line, strict=True), style, marker=marker, color=colour, label=label)
        axes.plot([128], [MARKS_US[op]], "_", markersize=24, color=colour, label=f"mark of {op}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens a rank")
    axes.set_ylabel("us")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    first = rows[0]
    sizes = f"H={first.hidden}, E={first.num_experts}, K={first.topk}, {first.world} ranks"
    axes.set_title(f"{first.hardware}, {sizes}, commit {first.commit}", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return f"Picture: {path}"
