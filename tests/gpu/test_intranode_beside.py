"""The shared expert beside the exchange on real streams: bits, memory, and that the kernels do run together."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe_ep
from benchmarks.breakdown import break_down, kind
from benchmarks.timing import device_spans
from moe_ep.autograd import beside
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from moe_ep.layers import moe
from tests.gpu.busy import keep_busy
from tests.gpu.test_intranode_streams import assert_spoilt, spoil
from tests.helpers.compare import assert_close, assert_same_bits
from tests.helpers.ranks import Pools

pytestmark = pytest.mark.gpu
HIDDEN = 256


def layers_of(group: dist.ProcessGroup, number: int, dtype: torch.dtype, hidden: int = HIDDEN) -> nn.ModuleList:
    """Layers with a shared expert that share a buffer."""
    config = MoEConfig(
        hidden_size=hidden,
        ffn_hidden_size=hidden // 2,
        num_experts=8,
        shared_ffn_hidden_size=hidden,
        init_std=0.05,
        router=RouterConfig(topk=3, score_function="sigmoid", normalize=True),
        ep=EPConfig(backend="intranode", timeout_secs=30),
    )
    torch.manual_seed(0)
    first = moe_ep.MoELayer(config, group)
    others = [moe_ep.MoELayer(config, group, buffer=first.buffer) for _ in range(number - 1)]
    return nn.ModuleList([first, *others]).to("cuda", dtype)


def tokens_of(group: dist.ProcessGroup, num_tokens: int, dtype: torch.dtype, hidden: int = HIDDEN) -> Tensor:
    rank = dist.get_rank(group)
    g = torch.Generator().manual_seed(rank)
    return torch.randn(num_tokens + rank, hidden, generator=g).to("cuda", dtype)


def step(layers: nn.ModuleList, x: Tensor, recompute: bool = False) -> dict[str, Tensor]:
    layers.zero_grad()
    leaf = x.clone().requires_grad_()
    y = leaf
    for layer in layers:
        y = y + (checkpoint(layer, y, use_reentrant=False) if recompute else layer(y))
    y.float().square().sum().backward()
    assert leaf.grad is not None
    grads = {name: p.grad.clone() for name, p in layers.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": leaf.grad, **grads}


def one_after_the_other(layers: nn.ModuleList, x: Tensor) -> dict[str, Tensor]:
    with ExitStack() as stack:
        for module in (beside, moe):
            stack.enter_context(mock.patch.object(module, "runs_beside", return_value=False))
        return step(layers, x)


def _same_bits(group: dist.ProcessGroup, recompute: bool) -> None:
    """Late peers, memory that is freed and filled at once, and a host far ahead of the GPU."""
    layers, x = layers_of(group, 3, torch.float32), tokens_of(group, 500, torch.float32)
    expected = one_after_the_other(layers, x)
    for i in range(12):
        if i % 4 == dist.get_rank(group):
            keep_busy(30)
        actual = step(layers, x, recompute)
        spoilt = spoil(x, *layers.parameters())
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_same_bits(actual[name], tensor, f"{name} of step {i}")
        assert_spoilt(spoilt)
    layers[0].buffer.close()


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("world", [1, 2])
def test_what_runs_beside_changes_no_bit(ranks: Pools, world: int, recompute: bool) -> None:
    ranks.run(_same_bits, world, recompute)


def _in_bfloat16(group: dist.ProcessGroup) -> None:
    """Beside an exchange the shared expert's products are grouped GEMMs: other sums, the same precision."""
    layers, x = layers_of(group, 2, torch.bfloat16), tokens_of(group, 700, torch.bfloat16)
    expected = one_after_the_other(layers, x)
    for i in range(8):
        if i % 4 == dist.get_rank(group):
            keep_busy(30)
        actual = step(layers, x)
        spoilt = spoil(x, *layers.parameters())
        for name, tensor in expected.items():
            assert_close(actual[name], tensor, 0.03, f"{name} of step {i}")
        assert_spoilt(spoilt)
    assert torch._C._get_sm_carveout_experimental() is None
    layers[0].buffer.close()


@pytest.mark.parametrize("world", [1, 2])
def test_in_bfloat16_values_agree(ranks: Pools, world: int) -> None:
    ranks.run(_in_bfloat16, world)


def _together(group: dist.ProcessGroup) -> tuple[float, float, float]:
    """Microseconds of exchange that GEMMs hide, of all exchange, and without anything beside."""
    layers, x = layers_of(group, 1, torch.bfloat16, 4096), tokens_of(group, 4096, torch.bfloat16, 4096)
    for _ in range(3):
        step(layers, x)
    spans = device_spans(lambda: step(layers, x), 3)
    split = break_down(spans, 3)
    assert split is not None
    total = sum(end - begin for name, begin, end in spans if kind(name) == "exchange") / 3
    alone = break_down(device_spans(lambda: one_after_the_other(layers, x), 3), 3)
    assert alone is not None
    layers[0].buffer.close()
    return split.hidden, total, alone.hidden


def test_exchange_and_gemms_run_at_the_same_time(ranks: Pools) -> None:
    ((hidden, total, alone),) = ranks.run(_together, 1)
    assert alone < 0.01 * total, f"{alone:.0f} of {total:.0f} us are hidden where nothing should be"
    assert hidden > 0.1 * total, f"{hidden:.0f} of {total:.0f} us of exchange are behind GEMMs"


def _peak(group: dist.ProcessGroup) -> tuple[int, int]:
    """Bytes at the peak of a step through eight layers, with work beside and without; the host is far ahead."""
    layers, x = layers_of(group, 8, torch.bfloat16, 512), tokens_of(group, 4000, torch.bfloat16, 512)
    peaks = []
    for run in (step, one_after_the_other):
        run(layers, x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        keep_busy(50)
        run(layers, x)
        peaks.append(torch.cuda.max_memory_allocated())
    layers[0].buffer.close()
    return peaks[0], peaks[1]


def test_what_runs_beside_takes_little_more_memory(ranks: Pools) -> None:
    for apart, together in ranks.run(_peak, 2):
        assert apart <= 1.1 * together
