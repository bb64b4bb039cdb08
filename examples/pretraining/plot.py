"""The picture of a run, drawn from the records of `metrics.jsonl` alone: loss curves, and expert load over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def draw(records: list[dict[str, Any]], bigram_loss: float | None, path: Path) -> bool:
    """Writes the PNG; False where matplotlib is missing.

    Args:
        records: lines of `metrics.jsonl`.
        bigram_loss: where to draw the line of the bigram table, nats per byte.
        path: of the picture.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: no global state, no window
    except ImportError:
        return False
    num_layers = len(records[0]["tokens_per_expert"]) if records else 0  # none: a finished run resumed elsewhere
    figure = Figure(figsize=(9, 4 + 3 * bool(num_layers)), layout="constrained")
    panels = figure.subplots(1 + bool(num_layers), 1, squeeze=False)[:, 0]
    _draw_losses(panels[0], records, bigram_loss)
    if num_layers:
        _draw_load(panels[1], records)
    figure.savefig(path, dpi=120)
    return True


def _draw_losses(axes: Any, records: list[dict[str, Any]], bigram_loss: float | None) -> None:
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], label="train", color="tab:blue", alpha=0.7)
    evaluated = [record for record in records if "val_loss" in record]
    steps = [record["step"] for record in evaluated]
    axes.plot(steps, [r["val_loss"] for r in evaluated], label="validation", color="tab:red", marker="o")
    if bigram_loss is not None:
        axes.axhline(bigram_loss, label=f"bigram table ({bigram_loss:.2f})", color="gray", linestyle="--")
    axes.set_xlim(0, max((record["step"] for record in records), default=1))
    axes.set_ylabel("loss, nats per byte")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_load(axes: Any, records: list[dict[str, Any]]) -> None:
    """One row per expert, layers below each other; colour = load over the mean of its layer."""
    counts = np.array([record["tokens_per_expert"] for record in records], dtype=float)  # [steps, layers, E]
    num_layers, num_experts = counts.shape[1:]
    load = counts / np.maximum(counts.mean(axis=2, keepdims=True), 1e-30)
    rows = load.reshape(len(records), -1).T
    steps = np.array([record["step"] for record in records], dtype=float)
    edges = np.concatenate(([0.0], steps))
    image = axes.pcolormesh(edges, np.arange(rows.shape[0] + 1), rows, cmap="coolwarm", vmin=0, vmax=2)
    for layer in range(1, num_layers):
        axes.axhline(layer * num_experts, color="black", linewidth=1)
    axes.set_yticks([(layer + 0.5) * num_experts for layer in range(num_layers)])
    axes.set_yticklabels([f"MoE layer {layer + 1}" for layer in range(num_layers)])
    axes.invert_yaxis()
    axes.set_xlabel("step")
    axes.set_title(f"load of the {num_experts} experts of each layer over time (1 = even)", fontsize=10)
    axes.figure.colorbar(image, ax=axes, label="tokens over mean", extend="max")
