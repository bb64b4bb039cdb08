"""What a run shows: a progress bar on a terminal, plain lines elsewhere, and the figures at the end."""

from __future__ import annotations

import math
import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Rank 0's view of the run; silent on the others.

    Args:
        visible: whether this rank shows anything.
        first_step, num_steps: steps done before, and to be done at the end.
    """

    def __init__(self, visible: bool, first_step: int, num_steps: int) -> None:
        self.visible, self.num_steps = visible, num_steps
        console = Console()
        self.progress: Progress | None = None
        if visible and console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
            self.progress = Progress(*columns, console=console)
            self.task = self.progress.add_task("train", total=num_steps, completed=first_step, text="")

    def __enter__(self) -> Display:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()

    def advance(self, step: int) -> None:
        """Moves the bar."""
        if self.progress is not None:
            self.progress.update(self.task, completed=step)

    def show(self, record: dict[str, Any]) -> None:
        """Shows one record of `metrics.jsonl`."""
        if not self.visible:
            return
        load = max(record["max_over_mean_load"], default=0.0)
        text = f"loss {record['loss']:.3f}  {record['tokens_per_sec']:,.0f} tokens/s  max/mean load {load:.2f}"
        if "val_loss" in record:
            text += f"  validation {record['val_loss']:.3f}"
        if self.progress is not None:
            self.progress.update(self.task, text=text)
        else:
            print(f"step {record['step']:>5}/{self.num_steps}  {text}", flush=True)


def load_over(records: list[dict[str, Any]], num_steps: int) -> float:
    """Largest max/mean expert load of any layer, counted over the records of the last tenth of the steps."""
    last = [record["tokens_per_expert"] for record in records if record["step"] > 0.9 * num_steps]
    worst = 0.0
    for counts_over_time in zip(*last, strict=True):  # one layer
        per_expert = [sum(counts) for counts in zip(*counts_over_time, strict=True)]
        worst = max(worst, max(per_expert) * len(per_expert) / max(sum(per_expert), 1))
    return worst


def print_summary(summary: dict[str, Any]) -> None:
    """The figures of the end, and as the last lines where everything lies."""
    validation, zeroed = summary["val_loss"], summary["val_loss_without_routed_experts"]
    rows = [
        ("validation loss", f"{validation:.3f} nats/byte", f"({validation / math.log(2):.3f} bits/byte)"),
        ("bigram table", f"{summary['bigram_loss']:.3f} nats/byte", "(counted on the training bytes, same split)"),
        ("routed experts zeroed", f"{zeroed:.3f} nats/byte", f"({zeroed - validation:+.3f}: what the experts add)"),
        ("max/mean expert load", f"{summary['max_over_mean_load']:.3f}", "(worst layer, last tenth of the steps)"),
        ("tokens/s", f"{summary['tokens_per_sec']:,.0f}", f"({summary['seconds']:.0f} s with validation and saving)"),
    ]
    print()
    for name, value, remark in rows:
        print(f"{name:<24}{value:<18}{remark}")
    print()
    print(f"run folder  {summary['run_dir']}")
    print(f"picture     {summary['picture']}", flush=True)


def warn(sentence: str) -> None:
    """A sentence on standard error."""
    print(sentence, file=sys.stderr, flush=True)
