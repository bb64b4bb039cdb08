"""The benchmarks run on CPU: rows with the fixed keys, the peers that are there, a sentence for those that are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import suites
from benchmarks.breakdown import break_down, covered, kind, longest
from benchmarks.compare import same_rows
from benchmarks.model import bound
from benchmarks.peers import PEERS
from benchmarks.processes import World
from benchmarks.records import read
from benchmarks.routing import Shape, Traffic, choose, owners, row_bytes
from benchmarks.timing import behind_mark, percentiles

ROOT = Path(__file__).parents[2]
CPU = World(0, 2, torch.device("cpu"), 0, False)
ONE_GPU = World(0, 2, torch.device("cuda", 0), 1, False)
SMALL = ["--tokens", "32", "--hidden", "128", "--num-experts", "8", "--topk", "2", "--iterations", "2"]


def run(script: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_cpu_run_puts_the_round_trip_beside_the_plain_one(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    said = run("ep.py", "--device", "cpu", *SMALL, "--out", str(out))
    rows = read(out)
    assert [(row["op"], row["system"]) for row in rows] == [
        ("dispatch_combine_fwd_bwd", "moe_ep"),
        ("dispatch_combine_fwd_bwd", "plain"),
    ]
    assert all(row["gpus"] == 0 and row["time_us"] > 0 and row["ceiling_gbps"] > 0 for row in rows)
    assert rows[0]["remote_bytes"] < rows[1]["remote_bytes"]
    assert "MB remote" in said


def test_every_case_runs_on_cpu_beside_all_to_all_and_missing_peers_are_named(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    cases = [name for name in suites.CASES if name != "dispatch_combine_fwd_bwd"]
    wanted = ["--dtypes", "bfloat16", "fp8", "--registered", "both", "--peers", "nccl", "torch_symm", "deep_ep+te"]
    said = run("ep.py", *SMALL, "--routing", "zipf1.0", "--cases", *cases, *wanted, "--out", str(out))
    rows = read(out)
    assert "left out" not in said
    assert {(row["op"], row["layout"]) for row in rows} == {suites.CASES[name] for name in cases}
    assert {row["system"] for row in rows} == {"moe_ep", "gloo"}
    assert {row["registered"] for row in rows if row["system"] == "moe_ep"} == {False, True}
    assert "deep_ep not installed" in rows[0]["versions"]
    assert "torch_symm needs CUDA" in rows[0]["versions"]


def test_the_layer_runs_on_cpu_at_one_and_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run("layer.py", "--shapes", "tiny", "--iterations", "2", "--out", str(out))
    assert [(row["op"], row["world"]) for row in read(out)] == [("layer_fwd_bwd", 1), ("layer_fwd_bwd", 2)]


def test_bench_gpu_without_a_gpu_measures_nothing_and_ends_well(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert "nothing was measured" in run("gpu.py", "--out", str(out), CUDA_VISIBLE_DEVICES="")
    assert not out.exists()


@pytest.mark.parametrize("name", ["nccl", "torch_symm", "torch_symm_vdev", "deep_ep", "deep_ep+te", "plain"])
def test_a_peer_that_cannot_run_on_a_shared_gpu_says_so_in_a_sentence(name: str) -> None:
    said = PEERS[name][0](ONE_GPU)
    assert said is not None
    assert said.startswith(name.split("+")[0])


def test_uniform_and_skewed_routing_choose_distinct_experts() -> None:
    shape = Shape(tokens=2000, hidden=8, num_experts=16, topk=4, routing="zipf1.0")
    idx = choose(shape, rank=0)
    assert all(len(set(row)) == 4 for row in idx.tolist())
    counts = torch.bincount(idx.flatten(), minlength=16)
    assert counts[0] > 2 * counts[8]
    even = torch.bincount(choose(Shape(2000, 8, 16, 4, "uniform"), 0).flatten(), minlength=16)
    assert even.max() < 1.3 * even.min()
    assert owners(5, 2).tolist() == [0, 0, 0, 1, 1]


def test_bytes_count_remote_rows_with_scales_and_crossings() -> None:
    traffic = Traffic(remote_rows=10, own_rows=6, remote_pairs=30, copies_per_row=2.0)
    assert row_bytes("fp8", 7168) == 7168 + 56 * 4
    assert traffic.remote_bytes("dispatch", "bfloat16", 128) == 10 * 256
    assert traffic.remote_bytes("dispatch_combine_fwd_bwd", "float32", 128, one_row_a_pair=True) == 4 * 30 * 512


def test_the_byte_model_names_the_link_the_sms_or_the_latency() -> None:
    shape = suites.DEEPSEEK_V3
    traffic = Traffic(remote_rows=4096, own_rows=4096, remote_pairs=16384, copies_per_row=4.0)

    def limit(num_sms: int, registered: bool, tokens: int = 4096) -> str:
        few = Traffic(tokens, tokens, tokens * 4, 4.0)
        made = bound("cached_dispatch", "compact", "bfloat16", shape, few, num_sms, registered, 390.0)
        assert made is not None
        return made.limit

    assert (limit(16, False), limit(32, True), limit(24, False, 8)) == ("SMs", "link", "SMs")
    assert limit(24, True, 8) == "latency"
    plain = bound("cached_dispatch", "compact", "bfloat16", shape, traffic, 16, False, 390.0)
    assert plain is not None
    assert plain.sm_us == pytest.approx(230, rel=0.02)  # own rows 82, their publication 57, pull 91
    assert bound("combine", "compact", "bfloat16", shape, traffic, None, False, 390.0) is None


def test_moved_rows_are_compared_bit_for_bit_and_sums_within_a_tolerance() -> None:
    x = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    assert same_rows([x], [x.clone()], 0.0)
    assert not same_rows([x], [x + 2**-6], 0.0)
    assert same_rows([x], [x + 2**-6], 2e-2)
    assert not same_rows([x], [x.float()], 2e-2)


def test_percentiles_lie_within_the_samples() -> None:
    assert percentiles([1.0, 2.0]) == (1.5, pytest.approx(1.1), pytest.approx(1.9))


def test_a_profile_begins_behind_the_call_in_which_ranks_wait_for_each_other() -> None:
    first, mark, second = (
        ("moe_ep_plan", 0.0, 16000.0),
        ("at::spin_kernel(long)", 16001.0, 16002.0),
        ("gemm", 16003.0, 1e5),
    )
    assert behind_mark([second, first, mark]) == [second]
    assert behind_mark([first, second]) == [first, second]


def test_a_step_is_split_into_parts_that_add_up_to_its_span() -> None:
    spans = [
        ("sm90_xmma_gemm_bf16", 0.0, 10.0),
        ("void moe_ep::(anonymous namespace)::moe_ep_pull<Cast>(Call)", 5.0, 20.0),
        ("void moe_ep::(anonymous namespace)::moe_ep_swiglu<bf16>(Call)", 20.0, 22.0),
        ("void at::native::vectorized_elementwise_kernel", 21.0, 25.0),
        ("ncclDevKernel_SendRecv", 30.0, 40.0),
    ]
    kinds = ["gemm", "exchange", "other", "other", "exchange"]
    assert [kind(name) for name, *_ in spans] == kinds
    split = break_down(spans, 2)
    assert split is not None
    assert (split.gemm, split.exchange, split.other, split.gaps) == (5.0, 10.0, 2.5, 2.5)
    assert split.total == 20.0
    assert covered(spans[:2]) == 20.0
    assert longest(spans, 1, 1) == [(spans[1][0], 15.0, 1.0)]
    assert break_down([], 2) is None


def test_the_suite_begins_with_the_shape_of_the_marks_and_profiles_last() -> None:
    jobs = list(suites.marks())
    assert jobs[0].shape == suites.DEEPSEEK_V3
    assert {job.shape.tokens for job in jobs} == {128, 512, 2048, 4096, 8192, 32768}
    assert {job.shape.hidden for job in jobs} == {2048, 4096, 7168}
    assert [job.with_kernels for job in jobs] == [False] * (len(jobs) - 1) + [True]
