"""The example's data: what is read, how it is split, and batches that depend on (seed, step) alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from examples.pretraining import data
from moe_ep import ConfigError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library of 25 files, and beside them what must be left out."""
    root = tmp_path / "library"
    for place in ("package", "site-packages", "test", "package/tests"):
        (root / place).mkdir(parents=True)
    for idx in range(20):
        (root / f"module_{idx:02}.py").write_bytes(f"a = {idx}\n".encode())
    for idx in range(5):
        (root / "package" / f"part_{idx}.py").write_bytes(f"b = {idx}\n".encode())
    for path in ("site-packages/x.py", "test/x.py", "package/tests/x.py", "package/x.txt"):
        (root / path).write_bytes(b"LEFT OUT")
    return root


def test_tests_installed_packages_and_other_files_are_left_out(library: Path) -> None:
    names = [path.relative_to(library).as_posix() for path in data.library_files(library)]
    assert len(names) == 25
    assert names == sorted(names)


def test_the_standard_library_of_this_python_is_long_enough_to_train_on() -> None:
    files = data.library_files()
    assert sum(path.stat().st_size for path in files) > 2_000_000
    assert not [path for path in files if "site-packages" in path.parts]


def test_no_file_is_both_trained_on_and_validated_on(library: Path, tmp_path: Path) -> None:
    files = data.library_files(library)
    train, validation = data.split_files(files)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == files
    assert len(validation) == 2
    data.write_corpus(tmp_path / "data", library)
    corpus = data.open_corpus(tmp_path / "data", seq_len=4)
    assert corpus.train.tobytes() == b"".join(path.read_bytes() for path in train)
    assert corpus.validation.tobytes() == b"".join(path.read_bytes() for path in validation)


def test_the_parts_are_written_once_and_mapped_not_read(library: Path, tmp_path: Path) -> None:
    data.write_corpus(tmp_path / "data", library)
    before = (tmp_path / "data" / "train.bin").stat().st_mtime_ns
    data.write_corpus(tmp_path / "data", library)
    assert (tmp_path / "data" / "train.bin").stat().st_mtime_ns == before
    assert isinstance(data.open_corpus(tmp_path / "data", 4).train, np.memmap)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["train.bin", "validation.bin"]


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    def starts(seed: int, step: int) -> list[int]:
        return data.train_starts(10_000, seed, step, 16, 32).tolist()

    assert starts(0, 7) == starts(0, 7)
    assert starts(0, 7) != starts(0, 8)
    assert starts(0, 7) != starts(1, 7)


def test_every_sequence_has_a_successor_for_its_last_byte() -> None:
    """Smallest text of all: one place to begin at."""
    part = np.arange(9, dtype=np.uint8)
    assert data.train_starts(9, 0, 0, 50, 8).tolist() == [0] * 50
    assert data.validation_starts(9, 3, 8).tolist() == [0, 0, 0]
    inputs, targets = data.windows(part, np.array([0, 0]), 8)
    assert inputs.tolist() == [list(range(8))] * 2
    assert targets.tolist() == [list(range(1, 9))] * 2
    assert inputs.dtype == torch.int64


def test_validation_sequences_span_the_whole_part() -> None:
    starts = data.validation_starts(1000, 5, 99)
    assert starts.tolist() == [0, 225, 450, 675, 900]


def test_the_bigram_table_counts_pairs_and_adds_one() -> None:
    """In "abab" a is followed by b twice and by nothing else: (2 + 1) / (2 + 256)."""
    table = data.BigramTable(np.frombuffer(b"abab", dtype=np.uint8))
    a, b = torch.tensor([[97]]), torch.tensor([[98]])
    assert table.loss(a, b) == pytest.approx(-np.log(3 / 258))
    assert table.loss(b, a) == pytest.approx(-np.log(2 / 257))
    assert table.loss(a, a) == pytest.approx(-np.log(1 / 258))
    assert table.loss(torch.tensor([[0]]), a) == pytest.approx(np.log(256))


def test_the_bigram_table_does_not_lose_a_pair_between_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(0).integers(0, 4, 1000).astype(np.uint8)
    whole = data.BigramTable(text).log_probs
    monkeypatch.setattr(data, "BIGRAM_PIECE", 7)
    assert np.array_equal(data.BigramTable(text).log_probs, whole)


def test_too_little_text_is_an_error_with_both_numbers(library: Path, tmp_path: Path) -> None:
    data.write_corpus(tmp_path / "data", library)
    with pytest.raises(ConfigError, match=r"validation\.bin has 13 bytes.*seq_len = 128 need at least 130"):
        data.open_corpus(tmp_path / "data", 128)


def test_text_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train.run_dir on a file system that all ranks share"):
        data.open_corpus(tmp_path, 4)
