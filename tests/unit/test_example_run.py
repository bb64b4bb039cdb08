"""The example's run around the training step: schedule, batch checks, run folder, picture, summary figures."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from examples.pretraining import plot
from examples.pretraining.report import load_over
from examples.pretraining.run_folder import RunFolder
from examples.pretraining.trainer import check_batch, learning_rate
from moe_ep import ConfigError
from moe_ep.config import TrainConfig


def train_config(**settings: Any) -> TrainConfig:
    values: dict[str, Any] = {"steps": 10, "global_batch_size": 4, "seq_len": 8, "lr": 1e-3, **settings}
    return TrainConfig(**values)


def records(num_steps: int, counts: list[list[int]]) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": 3.0 / step, "tokens_per_expert": counts, **({"val_loss": 3.0} if step % 2 else {})}
        for step in range(1, num_steps + 1)
    ]


# -- schedule and batch ------------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_then_falls_to_its_share() -> None:
    train = train_config(steps=12, warmup_steps=4, lr=1.0, min_lr_ratio=0.2)
    assert [learning_rate(train, step) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert learning_rate(train, 8) == pytest.approx(0.6)  # half a cosine is half way between 1 and 0.2
    assert learning_rate(train, 12) == pytest.approx(0.2)


def test_no_warmup_and_a_run_of_warmup_alone_are_both_fine() -> None:
    assert learning_rate(train_config(steps=1, lr=1.0, min_lr_ratio=0.5), 1) == pytest.approx(0.5)
    assert learning_rate(train_config(steps=3, warmup_steps=3, lr=1.0), 3) == 1.0


@pytest.mark.parametrize(
    ("settings", "num_ranks", "sentence"),
    [
        ({"global_batch_size": 6}, 4, "global_batch_size is 6, .* over 4 ranks; set it to 4 or 8"),
        ({"global_batch_size": 2}, 4, "global_batch_size is 2, .* over 4 ranks; set it to 4, or start"),
        ({"global_batch_size": 8, "micro_batch_size": 3}, 2, "micro_batch_size is 3, .* the 4 sequences of a rank"),
        ({"global_batch_size": 8, "micro_batch_size": 8}, 2, "micro_batch_size is 8, .* the 4 sequences of a rank"),
    ],
)
def test_a_batch_that_does_not_split_is_an_error(settings: dict[str, Any], num_ranks: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_batch(train_config(**settings), num_ranks)


def test_batches_that_split_are_accepted() -> None:
    check_batch(train_config(global_batch_size=8, micro_batch_size=2), 4)
    check_batch(train_config(global_batch_size=3), 3)


# -- run folder --------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: RunFolder, step: int) -> None:
    partial = folder.begin_checkpoint(step)
    partial.mkdir(parents=True)
    (partial / ".metadata").write_text(f"step {step}")
    folder.finish_checkpoint(step)


def test_latest_is_the_checkpoint_that_was_finished_last(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    write_checkpoint(folder, 20)
    write_checkpoint(folder, 10)  # a run continued from an older checkpoint
    folder.begin_checkpoint(30).mkdir()  # a save that was interrupted
    assert folder.find_checkpoint("latest").name == "step_000010"
    assert folder.owns(folder.find_checkpoint("latest"))


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    write_checkpoint(folder, 10)
    (folder.checkpoints / "step_000010" / "old").write_text("of the first save")
    write_checkpoint(folder, 10)
    assert [path.name for path in (folder.checkpoints / "step_000010").iterdir()] == [".metadata"]


def test_resuming_from_nothing_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    """case M04: a resume that finds nothing must not start from fresh weights."""
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"found no checkpoint in .*/run/checkpoints"):
        folder.find_checkpoint("latest")
    with pytest.raises(ConfigError, match=r"is not a checkpoint \(it has no .metadata file\)"):
        folder.find_checkpoint(str(tmp_path))


def test_a_new_run_moves_the_old_one_aside_and_deletes_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.start_anew() is None
    for number in (1, 2):
        folder.append({"step": number})
        assert folder.start_anew() == tmp_path / f"run.old-{number}"
    assert folder.records() == []
    old = RunFolder(tmp_path / "run.old-2").records()
    assert old == [{"step": 2}]


def test_a_resumed_run_forgets_the_records_that_it_will_make_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start_anew()
    for step in (1, 2, 3):
        folder.append({"step": step, "loss": 0.1 * step})
    with folder.metrics.open("a") as out:
        out.write('{"step": 4, "lo')  # the process died while it wrote
    before = folder.metrics.read_text().splitlines()
    folder.forget_after(2)
    assert folder.metrics.read_text().splitlines() == before[:2]


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_load_is_that_of_the_worst_layer_over_the_last_tenth() -> None:
    """Steps 19 and 20 of 20 count: layer 0 has 4 and 4 tokens, layer 1 has 6 and 2, so 6 over a mean of 4."""
    early, late = records(18, [[8, 0], [8, 0]]), records(20, [[2, 2], [3, 1]])[18:]
    assert load_over(early + late, 20) == pytest.approx(1.5)
    assert load_over(records(3, []), 3) == 0.0


@pytest.mark.parametrize("counts", [[[3, 1], [0, 0]], []])
def test_the_picture_is_drawn_from_the_records_alone(tmp_path: Path, counts: list[list[int]]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    assert plot.draw(records(4, counts), 2.5, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert plot.draw(json.loads(json.dumps(records(1, counts))), None, path)
    assert plot.draw([], 2.5, path)


def test_without_matplotlib_there_is_no_picture_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    assert plot.draw(records(2, [[1, 1]]), None, tmp_path / "curves.png") is False
    assert not (tmp_path / "curves.png").exists()
