"""A long run of the demo's model keeps its memory: nothing grows with the number of steps.

Two measures per process. RSS (VmRSS of /proc/self/status) is what the machine sees, but the allocator moves it by pages
and thread caches. The number of objects that Python's collector tracks is exact: one record kept per step shows as one
object per step, however small it is.
"""

from __future__ import annotations

import gc
import re
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from examples.pretraining.data import Corpus
from examples.pretraining.ranks import Ranks
from examples.pretraining.trainer import Trainer
from moe_ep.config import load_config
from tests.helpers.ranks import Pool, Pools

SETTLED = 50  # the step after which memory must be flat
# What may be added to RSS between step 50 and the end. A step that kept its handles (a kilobyte or more for each layer)
# or one activation (2 KiB) would add 4 MiB and more in 2,000 steps. Measured: 1.0 MiB, 0.8 of them before step 500,
# while the allocator meets ever rarer row counts.
MAX_GROWTH_BYTES = 2 * 2**20
MAX_NEW_OBJECTS = 50  # of some 10^5: caches that fill on a rare path; a leak would be thousands

SETTINGS = {  # the demo's model, narrow and short; all its features stay on
    "moe.hidden_size": "32", "moe.ffn_hidden_size": "16", "moe.shared_ffn_hidden_size": "16",
    "model.hidden_size": "32", "model.dense_ffn_hidden_size": "64", "model.num_heads": "2", "model.num_layers": "3",
    "train.seq_len": "16", "train.global_batch_size": "4", "train.micro_batch_size": "1", "train.eval_batches": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Of one process: RSS after every step, in bytes, and tracked objects at step 50 and at the end."""

    rss_bytes: array[int]
    objects_settled: int
    objects_at_end: int


def rss_bytes() -> int:
    """Resident memory of this process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def _train(group: dist.ProcessGroup, num_steps: int) -> Memory:
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    config = load_config(
        Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml",
        {**SETTINGS, "train.steps": str(num_steps), "train.warmup_steps": "10"},
        num_ranks,
    )
    assert config.model is not None
    assert config.train is not None
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 400, dtype=np.uint8)
    ranks = Ranks(rank, num_ranks, torch.device("cpu"), group, group, None)
    trainer = Trainer(config.moe, config.model, config.train, ranks, Corpus(text, text[::-1].copy()))
    rss, settled = array("q", [0] * num_steps), 0  # whole from the start: a list that grows would be measured as well
    for step in range(1, num_steps + 1):
        result = trainer.step(step)
        if step % 10 == 0:
            trainer.metrics(result)
        if step % 50 == 0:
            trainer.validation_loss()
        if step == SETTLED:
            settled = num_objects()  # its list of all objects takes megabytes too, so it comes before the measure
        rss[step - 1] = rss_bytes()
    at_end = num_objects()
    trainer.model.buffer.close()
    return Memory(rss, settled, at_end)


def check_flat(memories: list[Memory]) -> None:
    for rank, memory in enumerate(memories):
        settled, highest = max(memory.rss_bytes[:SETTLED]), max(memory.rss_bytes[SETTLED:])
        growth, objects = highest - settled, memory.objects_at_end - memory.objects_settled
        assert growth <= MAX_GROWTH_BYTES, f"rank {rank}: RSS rose by {growth} bytes from {settled}"
        assert objects <= MAX_NEW_OBJECTS, f"rank {rank}: {objects} objects more than at step {SETTLED}"


@pytest.mark.world_size(2)
def test_200_steps_keep_their_memory(ranks: Pools) -> None:
    check_flat(ranks.run(_train, 2, 200, timeout_secs=100))


@pytest.mark.slow(ci=True)
@pytest.mark.timeout(900)
@pytest.mark.world_size(2)
def test_2000_steps_keep_their_memory() -> None:
    """In processes of their own, so that nothing which another test freed could take up a leak."""
    pool = Pool(2)
    try:
        check_flat(pool.run(_train, 2, (2000,), timeout_secs=800))
    finally:
        pool.close()
