"""Megatron-Core on two GPUs: its MoE layer with our dispatcher beside its alltoall, over NCCL and NVLink."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_megatron_layer import CASES, ONLY_OURS
from tests.helpers import megatron_jobs as jobs
from tests.helpers.ranks import Pool

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
EP2, TP2 = (1, 2, 1), (2, 1, 2)
RTOL = 2e-5  # float32, whose products CUDA adds in another order for other sizes
BF16_RTOL = 3e-2
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
GROUPED = {**BF16, "moe_grouped_gemm": True, "transformer_impl": "transformer_engine", "moe_ffn_hidden_size": 32}


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Pool]:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed: pip install megatron-core")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL needs a GPU for each of two ranks, and there is {torch.cuda.device_count()}")
    pool = Pool(2, "nccl")
    pool.run(jobs.arrange_on_cuda, 2, (EP2,), 110)
    yield pool
    pool.close()


def compare(pool: Pool, limit: float, *arguments: Any) -> None:
    per_rank = pool.run(jobs.compare, 2, arguments, 60)
    apart = [(name, worst, rank) for rank, found in enumerate(per_rank) for name, worst in found if worst > limit]
    assert not apart, f"(tensor, relative departure from alltoall, rank): {apart}"


@pytest.mark.parametrize("layout", [EP2, TP2], ids=["ep2", "tp2"])
@pytest.mark.parametrize("case", CASES)
def test_the_layer_does_what_it_does_with_alltoall(two_gpus: Pool, case: str, layout: jobs.Layout) -> None:
    compare(two_gpus, RTOL, layout, "moe_ep", CASES[case])


@pytest.mark.parametrize("case", sorted(CASES.keys() - ONLY_OURS))
def test_the_unchanged_flex_dispatcher_on_our_deep_ep_does_the_same(two_gpus: Pool, case: str) -> None:
    compare(two_gpus, RTOL, EP2, "deep_ep-api", CASES[case])


@pytest.mark.parametrize("dispatcher", ["moe_ep", "deep_ep-api"])
def test_grouped_gemms_in_bfloat16_agree_within_their_rounding(two_gpus: Pool, dispatcher: str) -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="Megatron's grouped GEMM is Transformer Engine's")
    compare(two_gpus, BF16_RTOL, EP2, dispatcher, GROUPED)


def test_a_step_waits_for_the_device_nowhere_but_in_dispatch(two_gpus: Pool) -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="Megatron's grouped GEMM is Transformer Engine's")
    for found in two_gpus.run(jobs.waits_of_a_step, 2, ("moe_ep", GROUPED), 60):
        ours = [place for place in found if "moe_ep" in place]
        assert ours == []


def test_the_backend_is_the_one_inside_a_node(two_gpus: Pool) -> None:
    for _, _, num_sms, backend in two_gpus.run(jobs.shared_buffers, 2, (EP2,), 60):
        assert (num_sms, backend) == (24, "intranode")


def test_a_zero_probability_stays_with_the_expert_that_was_chosen(two_gpus: Pool) -> None:
    per_rank = two_gpus.run(jobs.zero_probability, 2, ("moe_ep", EP2), 60)
    num_tokens = 2 * 4 * jobs.SEQUENCES
    assert [count for counts, _ in per_rank for count in counts] == [0, num_tokens, 0, 0, 0, 0, num_tokens, 0]


@pytest.mark.timeout(200)
def test_the_example_trains_alike_with_three_dispatchers(two_gpus: Pool, tmp_path: Path) -> None:
    left_out = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    command = [sys.executable, str(ROOT / "examples" / "megatron_pretrain.py")]
    command += ["--set", "train.dtype=bfloat16", "--set", f"train.run_dir={tmp_path}"]
    ran = subprocess.run(
        command, env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}, capture_output=True,
        text=True, timeout=190, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "All three agree." in ran.stdout
