"""MoELayer on the kernels: oracle, recompute, compile, checkpoints and gradients over ranks, as with the torch backend.

Each test runs the function that tests/distributed runs on the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from moe_ep.parallel import reduce_gradients
from tests.distributed.test_checkpoint import assert_loads, straight_and_resumed
from tests.distributed.test_layer import against_oracle
from tests.distributed.test_parallel import bias_step, expert_scale, router_gradient, sgd
from tests.distributed.test_wrappers_checkpoint import COUNTED, MODES, assert_exchanges, counted_tokens, functional
from tests.distributed.test_wrappers_compile import TOKENS, compiled_and_eager, recomputed
from tests.helpers.ranks import Pools

pytestmark = pytest.mark.gpu
BACKEND = "intranode"


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "alignment", "exact"), [(torch.float64, 1, False), (torch.float32, 4, True)])
def test_layer_and_all_gradients_equal_the_dense_oracle(
    ranks: Pools, dtype: torch.dtype, alignment: int, exact: bool, world: int
) -> None:
    ranks.run(against_oracle, world, dtype, alignment, exact, "plain", BACKEND)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_recompute_communicates_only_where_the_whole_layer_is_recomputed(
    ranks: Pools, mode: str, world: int
) -> None:  # case A06
    assert_exchanges(ranks, mode, world, BACKEND)


@pytest.mark.parametrize("mode", ["none", "plain", "selective"])
def test_recompute_counts_every_token_once(ranks: Pools, mode: str) -> None:  # case B01
    assert ranks.run(counted_tokens, 2, mode, "", BACKEND) == [COUNTED] * 2


def test_selective_checkpointing_keeps_a_functional_exchange(ranks: Pools) -> None:  # case A06
    ranks.run(functional, 2, BACKEND)


@pytest.mark.parametrize("world", [1, 2])
def test_steps_in_one_graph_have_eagers_bits_and_compile_twice(ranks: Pools, world: int) -> None:  # case O01
    arguments = (TOKENS, "aot_eager", 0.0, {"fullgraph": True}, None, BACKEND)
    for frames, breaks in ranks.run(compiled_and_eager, world, *arguments, timeout_secs=110):
        assert frames[-1] <= 2
        assert breaks == 0


def test_selective_checkpointing_inside_the_graph_keeps_the_exchange(ranks: Pools) -> None:
    ranks.run(recomputed, 2, BACKEND, timeout_secs=110)


@pytest.mark.parametrize("saved_at", [1, 2])
def test_a_checkpoint_loads_at_another_ep_size(ranks: Pools, tmp_path: Path, saved_at: int) -> None:  # case M01
    assert_loads(ranks, str(tmp_path / "ckpt"), saved_at, (1, 2), BACKEND)


def test_a_resumed_run_has_the_bits_of_a_straight_one(ranks: Pools, tmp_path: Path) -> None:  # case M04
    ranks.run(straight_and_resumed, 2, str(tmp_path / "ckpt"), BACKEND)


def test_expert_gradients_do_not_depend_on_how_the_ranks_are_used(ranks: Pools) -> None:  # case L01
    with_ep = ranks.run(expert_scale, 2, True, BACKEND)
    assert [with_ep[0][0], with_ep[1][0]] == [7.5, 8.0]
    assert ranks.run(expert_scale, 2, False, BACKEND) == [[7.5, 8.0]] * 2
    ep, dp = ranks.run(sgd, 2, True, BACKEND), ranks.run(sgd, 2, False, BACKEND)
    torch.testing.assert_close(torch.tensor(ep).flatten(), torch.tensor(dp[0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("world", [1, 2])
def test_the_router_sees_the_tokens_of_all_ranks(ranks: Pools, world: int) -> None:  # cases L03, B08
    for grad in ranks.run(router_gradient, world, BACKEND):
        torch.testing.assert_close(torch.tensor(grad), torch.tensor([[-0.625, -0.625], [0.625, 0.625]]))
    assert ranks.run(bias_step, world, BACKEND) == [[-0.5, 0.5]] * world


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _train(group: dist.ProcessGroup, num_steps: int) -> tuple[list[float], list[tuple[int, int, int]]]:
    """Losses, and (allocated, reserved, resident) bytes after a tenth of the steps and after all."""
    rank = dist.get_rank(group)
    router = RouterConfig(topk=2, score_function="sigmoid", normalize=True, expert_bias=True)
    ep = EPConfig(timeout_secs=20, backend=BACKEND, alignment=8)
    config = MoEConfig(hidden_size=128, ffn_hidden_size=64, num_experts=8, init_std=0.2, router=router, ep=ep)
    torch.manual_seed(0)
    first = moe_ep.MoELayer(config, group)
    layers = torch.nn.ModuleList([first, moe_ep.MoELayer(config, group, buffer=first.buffer)]).cuda()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(rank)
    batches = [torch.randn(300 + 40 * (i % 5) + rank, 128, generator=g).cuda() for i in range(10)]
    losses, memory = [], []
    for step in range(num_steps):
        x = batches[step % len(batches)]
        y = x
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for layer in layers:
                y = y + layer(y)
        loss = (y - x.roll(1, dims=1)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        reduce_gradients(layers.parameters(), group)
        optimizer.step()
        for layer in layers:
            layer.update_expert_bias()
        first.buffer.check()
        if step % len(batches) == len(batches) - 1:
            losses.append(loss.item())
        if step + 1 in (num_steps // 10, num_steps):
            torch.cuda.synchronize()
            memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), _resident_bytes()))
    first.buffer.close()
    return losses, memory


def test_three_hundred_steps_of_training_hold_their_memory(ranks: Pools) -> None:
    for losses, (early, late) in ranks.run(_train, 2, 300, timeout_secs=110):
        assert losses[-1] < losses[0]
        assert late[0] <= early[0] + 2**16  # what autograd still holds of the last step
        assert late[1] <= early[1] + 2**26  # blocks for the largest number of rows so far
        assert late[2] <= early[2] + 2**25
