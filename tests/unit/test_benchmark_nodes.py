"""The byte model between nodes: its expectations are those of drawn ids, and it grows as its inputs do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.nodes import Shape, cost, hit


@pytest.mark.parametrize(("num_nodes", "num_experts"), [(2, 256), (8, 256), (32, 256), (4, 64)])
def test_rows_over_the_network_are_those_of_drawn_ids(num_nodes: int, num_experts: int) -> None:
    g = torch.Generator().manual_seed(3)
    idx = torch.rand(4000, num_experts, generator=g).argsort(dim=1)[:, :8]
    node = idx // (num_experts // num_nodes)
    drawn = sum(float((node == other).any(dim=1).float().mean()) for other in range(1, num_nodes))
    expected = cost(Shape(4000, 7168, num_experts, 8, num_nodes, 2), 24, 46.0).crossings
    assert expected == pytest.approx(drawn, rel=0.03)


def test_all_experts_in_one_node_are_always_hit() -> None:
    assert hit(64, 8, 64) == 1
    assert cost(Shape(4096, 7168, 64, 8, 1, 8), 24, 46.0).crossings == 0


def test_more_staging_means_fewer_rounds_and_larger_puts() -> None:
    shape = Shape(4096, 7168, 1024, 8, 128, 8)
    small, large = cost(shape, 24, 46.0), cost(shape, 24, 46.0, 1 << 30)
    assert large.rounds < small.rounds
    assert large.chunk_bytes >= small.chunk_bytes
    assert large.rounds_us < small.rounds_us


def test_the_command_of_the_docs_prints_the_table() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "benchmarks/nodes.py"], cwd=root, env={"PATH": ""}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "2048" in done.stdout
