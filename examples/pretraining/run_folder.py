"""The folder of a run: `metrics.jsonl`, `summary.json`, the picture, `data/` and `checkpoints/step_XXXXXX`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from moe_ep import ConfigError


class RunFolder:
    """Paths and records of one run. Only rank 0 writes records; the paths are for all."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.summary = root / "summary.json"
        self.picture = root / "curves.png"
        self.data = root / "data"
        self.checkpoints = root / "checkpoints"
        # Of a run that has not begun, beside one that lies there.
        self.new_data = root.with_name(f"{root.name}.new-data")

    def find_checkpoint(self, resume: str) -> Path:
        """The checkpoint that `--resume` names: "latest" of this run, or a folder.

        Raises:
            ConfigError: there is none.
        """
        pointer = self.checkpoints / "latest"
        if resume == "latest":
            if not pointer.exists():
                raise ConfigError(
                    f"--resume found no checkpoint in {self.checkpoints}; name one with --resume PATH, set "
                    "train.run_dir to the run to continue, or start anew without --resume."
                )
            return self.checkpoints / pointer.read_text().strip()
        folder = Path(resume)
        if not (folder / ".metadata").exists():
            raise ConfigError(
                f"--resume {resume} is not a checkpoint (it has no .metadata file); give a folder like "
                f"{self.checkpoints / 'step_000100'}."
            )
        return folder

    def owns(self, checkpoint: Path) -> bool:
        """Whether the checkpoint was written by this run."""
        return checkpoint.resolve().parent == self.checkpoints.resolve()

    def data_before(self, starts_anew: bool) -> Path:
        """Where a run has its data until it begins: not in the folder of a run that it will move aside."""
        return self.new_data if starts_anew and self.metrics.exists() else self.data

    def drop_new_data(self) -> None:
        """Of a run that does not begin."""
        shutil.rmtree(self.new_data, ignore_errors=True)

    def start_anew(self) -> Path | None:
        """Makes the folder; a run that lies there already is moved aside and its new place returned."""
        aside = None
        if self.metrics.exists():
            number = 1
            while (aside := self.root.with_name(f"{self.root.name}.old-{number}")).exists():
                number += 1
            self.root.rename(aside)
        self.root.mkdir(parents=True, exist_ok=True)
        if self.new_data.exists() and not self.data.exists():
            self.new_data.rename(self.data)
        self.drop_new_data()  # of a run that ended before it could begin
        self.metrics.touch()
        return aside

    def forget_after(self, step: int) -> None:
        """Removes the records of later steps than `step`, which a resumed run will make again."""
        kept = [json.dumps(record) for record in self.records() if record["step"] <= step]
        self.metrics.write_text("".join(f"{line}\n" for line in kept))

    def append(self, record: dict[str, Any]) -> None:
        """Adds one line to `metrics.jsonl`."""
        with self.metrics.open("a") as out:
            out.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All lines of `metrics.jsonl`; a last line that was cut off is left out."""
        records = []
        for line in self.metrics.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records

    def begin_checkpoint(self, step: int) -> Path:
        """A folder to write the checkpoint of `step` into; what an interrupted save left there is removed."""
        partial = self.partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        return partial

    def finish_checkpoint(self, step: int) -> None:
        """Gives the written folder its name and makes it the latest: a checkpoint is there whole or not at all."""
        final = self.checkpoints / f"step_{step:06d}"
        shutil.rmtree(final, ignore_errors=True)
        self.partial(step).rename(final)
        pointer = self.checkpoints / "latest.partial"
        pointer.write_text(final.name)
        pointer.replace(self.checkpoints / "latest")

    def partial(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}.partial"
