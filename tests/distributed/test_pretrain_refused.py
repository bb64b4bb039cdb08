"""A pretraining run that is refused, by whatever it is, leaves the run that lies in its folder as it was."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_pretrain import PRETRAIN, ROOT, SMALL, environment, pretrain, pretrain_arguments, start

# A layer that has something against its rows only once it sees them.
REFUSING_LAYER = """
import sys
sys.path.insert(0, {examples!r})
import moe_ep
def forward(self, x):
    raise ValueError("a row has 64 bytes; give other rows.")
moe_ep.MoELayer.forward = forward
import pretrain
sys.exit(pretrain.main(sys.argv[1:]))
"""


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def lying_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with a checkpoint."""
    run_dir = tmp_path_factory.mktemp("pretrain") / "run"
    settings = {"train.steps": "2", "train.warmup_steps": "1", "train.checkpoint_every": "2", "train.eval_every": "2"}
    pretrain(None, run_dir, {**SMALL, **settings})
    return run_dir


def assert_untouched(run_dir: Path, before: dict[str, bytes], done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode != 0
    assert contents(run_dir) == before
    assert [path.name for path in run_dir.parent.iterdir()] == [run_dir.name], "nothing lies beside it"


@pytest.mark.parametrize(
    ("num_ranks", "settings", "sentence"),
    [
        (None, {"moe.fp8.recipe": "blockwise"}, r"fp8\.recipe is 'blockwise'"),
        (2, {"moe.ep.backend": "intranode"}, "backend is 'intranode', but on rank 0 "),
        (None, {"train.seq_len": "9999999", "model.max_seq_len": "9999999"}, "train.seq_len = 9999999 need at least"),
    ],
)
def test_settings_that_the_layer_the_buffer_or_the_data_refuse_move_nothing(
    lying_run: Path, num_ranks: int | None, settings: dict[str, str], sentence: str
) -> None:
    before = contents(lying_run)
    done = start(num_ranks, PRETRAIN, *pretrain_arguments(lying_run, {**SMALL, **settings}))
    assert re.search(sentence, done.stderr), done.stderr
    assert_untouched(lying_run, before, done)


def test_rows_that_the_first_pass_refuses_move_nothing(lying_run: Path) -> None:
    before, driver = contents(lying_run), REFUSING_LAYER.format(examples=str(ROOT / "examples"))
    done = subprocess.run(
        [sys.executable, "-c", driver, *pretrain_arguments(lying_run, SMALL)],
        env=environment(), capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert "a row has 64 bytes; give other rows." in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert_untouched(lying_run, before, done)


def test_a_checkpoint_of_another_model_moves_nothing(lying_run: Path, tmp_path: Path) -> None:
    """Neither the run that lies there, where the checkpoint is another's, nor its records, where it is its own."""
    other = tmp_path / "other"
    settings = {**SMALL, "train.steps": "1", "train.warmup_steps": "1", "model.num_layers": "4"}
    pretrain(None, other, settings)
    before = contents(lying_run)
    for checkpoint in (other / "checkpoints" / "step_000001", lying_run / "checkpoints" / "step_000002"):
        changed = SMALL if checkpoint.is_relative_to(other) else {**SMALL, "model.num_layers": "4"}
        done = start(None, PRETRAIN, *pretrain_arguments(lying_run, changed, "--resume", str(checkpoint)))
        assert done.returncode == 2, done.stderr
        assert_untouched(lying_run, before, done)


def test_a_run_that_begins_moves_the_other_aside_and_has_data_of_its_own(lying_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = {**SMALL, "train.steps": "1", "train.warmup_steps": "1", "train.eval_every": "1"}
    for _ in range(2):
        pretrain(None, run_dir, settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1"]
    data = [contents(folder / "data") for folder in (run_dir, tmp_path / "run.old-1")]
    assert data[0] == data[1]
    assert sorted(data[0]) == ["train.bin", "validation.bin"]
