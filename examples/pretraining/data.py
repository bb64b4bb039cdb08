"""Text that is on every machine: the sources of Python's standard library, as bytes.

The files are sorted by path, every tenth goes to validation, each part is one memory-mapped file of bytes. A batch is a
function of (seed, step) alone: it is the same whatever the number of ranks, and a resumed run needs no data state.

Letters: B sequences, S bytes of a sequence.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep import ConfigError

VALIDATION_EVERY = 10  # one file in ten is kept for validation
BIGRAM_PIECE = 1 << 22  # pairs counted at once: each takes 8 bytes
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}  # installed by some only

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """The two parts, memory-mapped; no file is in both."""

    train: Bytes
    validation: Bytes

    def fingerprint(self) -> str:
        """A short hash of all bytes: two runs with the same one saw the same text."""
        digest = hashlib.sha256(self.train)
        digest.update(self.validation)
        return digest.hexdigest()[:16]


def library_files(root: Path | None = None) -> list[Path]:
    """The *.py files of the standard library (or of `root`), sorted; its tests and installed packages left out."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def split_files(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """(train, validation): every tenth file is validation."""
    validation = files[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    return [path for idx, path in enumerate(files) if (idx + 1) % VALIDATION_EVERY], validation


def write_corpus(folder: Path, root: Path | None = None) -> None:
    """Writes `train.bin` and `validation.bin` into `folder` where they are missing, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = zip(("train", "validation"), split_files(library_files(root)), strict=True)
    for name, files in parts:
        target = folder / f"{name}.bin"
        if target.exists():
            continue
        partial = folder / f"{name}.bin.partial-{os.getpid()}"
        with partial.open("wb") as out:
            for path in files:
                out.write(path.read_bytes())
        partial.replace(target)


def open_corpus(folder: Path, seq_len: int) -> Corpus:
    """Maps what `write_corpus` wrote.

    Raises:
        ConfigError: a file is not there, or too short for sequences of `seq_len` bytes and their successors.
    """
    parts = []
    for name in ("train", "validation"):
        path = folder / f"{name}.bin"
        if not path.exists():
            raise ConfigError(f"{path} is missing; put train.run_dir on a file system that all ranks share.")
        size = path.stat().st_size
        if size < seq_len + 2:
            raise ConfigError(
                f"{path} has {size} bytes, but sequences of train.seq_len = {seq_len} need at least {seq_len + 2}; is "
                f"the standard library of this Python there as sources ({sysconfig.get_path('stdlib')})?"
            )
        parts.append(np.memmap(path, dtype=np.uint8, mode="r"))
    return Corpus(*parts)


def train_starts(num_bytes: int, seed: int, step: int, num_sequences: int, seq_len: int) -> NDArray[np.int64]:
    """[B] where the sequences of optimizer step `step` begin, uniform with replacement."""
    return np.random.default_rng((seed, step)).integers(0, num_bytes - seq_len, size=num_sequences)


def validation_starts(num_bytes: int, num_sequences: int, seq_len: int) -> NDArray[np.int64]:
    """[B] evenly spaced over the whole file, the same every time."""
    return np.linspace(0, num_bytes - seq_len - 1, num_sequences).astype(np.int64)


def windows(part: Bytes, starts: NDArray[np.int64], seq_len: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets), each [B, S] int64; a target is the byte after its input."""
    taken = part[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    both = torch.from_numpy(taken)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class BigramTable:
    """Predicts a byte from the one before it, by counting; every count starts at one."""

    def __init__(self, train: Bytes) -> None:
        pairs = np.zeros(256 * 256, dtype=np.int64)
        for begin in range(0, len(train) - 1, BIGRAM_PIECE):
            piece = train[begin : begin + BIGRAM_PIECE + 1].astype(np.int64)
            pairs += np.bincount(piece[:-1] * 256 + piece[1:], minlength=256 * 256)
        counts = pairs.reshape(256, 256) + 1.0
        self.log_probs = np.log(counts / counts.sum(axis=1, keepdims=True))

    def loss(self, inputs: Tensor, targets: Tensor) -> float:
        """Mean negative log-likelihood, nats per byte."""
        return float(-self.log_probs[inputs.numpy(), targets.numpy()].mean())
