"""torch.compile: one graph through router, dispatch, experts and combine, with eager's bits, compiled twice at most."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import moe_ep
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from moe_ep.layers.grouped_linear import grouped_linear, grouped_linear_backward
from moe_ep.layers.wrap import keep_exchange_contexts
from tests.distributed.test_wrappers_checkpoint import count_exchanges
from tests.helpers.compare import assert_close, assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import device_of

HIDDEN = 16
TOKENS = (6, 5, 9, 4, 13, 7, 3, 8, 11, 5)  # of one rank, step by step; rank r has r more


def layer_config(**changes: Any) -> MoEConfig:
    router = RouterConfig(
        topk=2,
        score_function="sigmoid",
        normalize=True,
        num_groups=4,
        group_topk=2,
        expert_bias=True,
        seq_aux_loss_coef=0.1,
        z_loss_coef=0.1,
    )
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 8,
        "num_experts": 8,
        "shared_ffn_hidden_size": 8,
        "init_std": 0.3,
        "router": router,
        "ep": EPConfig(timeout_secs=60, alignment=4),
    }
    return MoEConfig(**(settings | changes))


class Block(nn.Module):
    """x + MoE(LayerNorm(x))."""

    def __init__(self, group: dist.ProcessGroup | None, buffer: moe_ep.Buffer | None = None, **router: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        config = layer_config()
        if router:
            config = layer_config(router=config.router.model_copy(update=router))
        self.moe = moe_ep.MoELayer(config, group, buffer=buffer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.norm(x))
        return y


def _results(function: Any, block: Block, x: Tensor) -> dict[str, Tensor]:
    """y, dx, the gradient of every parameter, and what the router counted, of one forward and backward."""
    block.zero_grad()
    block.moe.router.tokens_per_expert.zero_()
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    y.square().sum().backward()
    assert leaf.grad is not None
    grads = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    stats = {name: value.clone() for name, value in block.moe.routing_stats().items()}
    return {"y": y.detach(), "dx": leaf.grad, "counts": block.moe.router.tokens_per_expert.clone(), **grads, **stats}


def compiled_and_eager(
    group: dist.ProcessGroup,
    tokens: tuple[int, ...],
    backend: str,
    rtol: float,
    options: dict[str, Any],
    router: dict[str, Any] | None = None,
    ep_backend: str = "auto",
) -> tuple[list[int], int]:
    """Steps with changing routings and row counts; the frames compiled after each step, and the graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(0)
    buffer = moe_ep.Buffer(group, backend=ep_backend, timeout_secs=60)
    block = Block(group, buffer, **(router or {})).to(device_of(ep_backend), torch.float64)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(block, backend=counter, **options)
    frames = []
    for step, num_tokens in enumerate(tokens):
        g = torch.Generator().manual_seed(step * world + rank)
        x = torch.randn(num_tokens + rank, HIDDEN, generator=g, dtype=torch.float64).to(device_of(ep_backend))
        expected = _results(block, block, x)
        actual = _results(compiled, block, x)
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            if rtol:
                assert_close(actual[name], tensor, rtol, f"{name} of step {step}")
            else:
                assert_same_bits(actual[name], tensor, f"{name} of step {step}")
        frames.append(counter.frame_count)
    block.moe.buffer.close()
    return frames, sum(counters["graph_break"].values())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ten_steps_in_one_graph_have_eagers_bits_and_compile_twice(ranks: Pools, world: int) -> None:  # case O01
    """Once for the first number of tokens, once for any number."""
    options = {"fullgraph": True}
    for frames, breaks in ranks.run(compiled_and_eager, world, TOKENS, "aot_eager", 0.0, options, timeout_secs=100):
        assert frames[-1] <= 2
        assert breaks == 0


@pytest.mark.parametrize("world", [1, 2])
def test_the_global_aux_loss_is_in_the_graph_with_its_exchange(ranks: Pools, world: int) -> None:  # case O01
    """The counts cross the group inside the graph; the loss needs no gradient from there."""
    arguments = (TOKENS[:4], "aot_eager", 0.0, {"fullgraph": True}, {"global_aux_loss_coef": 0.1})
    for frames, breaks in ranks.run(compiled_and_eager, world, *arguments, timeout_secs=100):
        assert frames[-1] <= 2
        assert breaks == 0


def test_a_frozen_router_counts_in_the_graph() -> None:  # case B01, O01
    torch._dynamo.reset()
    block = Block(None).double()
    block.moe.router.requires_grad_(False)
    x = torch.randn(6, HIDDEN, dtype=torch.float64)
    expected = _results(block, block, x)
    actual = _results(torch.compile(block, backend="aot_eager", fullgraph=True), block, x)
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, name)
    assert int(actual["counts"].sum()) == 12


def test_dynamic_from_the_start_compiles_once(ranks: Pools) -> None:  # case O01
    options = {"fullgraph": True, "dynamic": True}
    for frames, breaks in ranks.run(compiled_and_eager, 2, TOKENS[:3], "aot_eager", 0.0, options, timeout_secs=100):
        assert frames[-1] == frames[0]
        assert breaks == 0


def test_without_fullgraph_the_graph_breaks_around_dispatch_and_stays_right(ranks: Pools) -> None:  # case O01
    for frames, breaks in ranks.run(compiled_and_eager, 2, TOKENS, "aot_eager", 0.0, {}, timeout_secs=100):
        assert frames[-1] == frames[2]  # every part once for the first number of tokens and once for any
        assert breaks > 0


def test_ranks_may_compile_for_no_token_and_for_one(ranks: Pools) -> None:
    """PyTorch makes graphs of their own for sizes 0 and 1; the other rank meanwhile has another graph."""
    options = {"fullgraph": True}
    results = ranks.run(compiled_and_eager, 2, (0, 5, 0), "aot_eager", 0.0, options, timeout_secs=100)
    assert max(frames[-1] for frames, _ in results) <= 3


@pytest.mark.slow(ci=True)
@pytest.mark.timeout(400)
def test_inductor_agrees_with_eager(ranks: Pools) -> None:  # case O01
    """Inductor rounds otherwise (fused products), so the values agree to 1e-12 and not in their bits."""
    options = {"fullgraph": True}
    results = ranks.run(compiled_and_eager, 2, TOKENS[:4], "inductor", 1e-12, options, timeout_secs=300)
    assert max(frames[-1] for frames, _ in results) <= 2


def test_layers_that_share_a_buffer_share_a_graph() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with moe_ep.Buffer() as buffer:
        blocks = [Block(None, buffer) for _ in range(10)]
        for block in blocks:
            block.compile(backend=counter, fullgraph=True)
            block(torch.randn(6, HIDDEN)).sum().backward()
    assert counter.frame_count == 1


def recomputed(group: dist.ProcessGroup, ep_backend: str = "auto") -> None:
    """Selective checkpointing inside the graph: recompute does not communicate there either."""
    torch._dynamo.reset()
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    buffer = moe_ep.Buffer(group, backend=ep_backend, timeout_secs=60)
    block = Block(group, buffer).to(device_of(ep_backend), torch.float64)
    counts = count_exchanges(block.moe.buffer)
    x = torch.randn(5 + rank, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    x = x.to(device_of(ep_backend))
    expected = _results(block, block, x)
    counts.clear()

    def recomputing(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=keep_exchange_contexts)
        return y

    # What the layer notes about its last forward is written in forward only; PyTorch wants to hear that this is fine.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        actual = _results(torch.compile(recomputing, backend="aot_eager", fullgraph=True), block, x)
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, name)
    assert set(counts.values()) == {1}
    block.moe.buffer.close()


def test_selective_checkpointing_inside_the_graph_keeps_the_exchange(ranks: Pools) -> None:
    ranks.run(recomputed, 2, timeout_secs=100)


def test_autocast_inside_the_graph_has_eagers_bits() -> None:  # case N02
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block(None)
    x = torch.randn(6, HIDDEN)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = block(x)
        return y.float()

    expected = _results(run, block, x)
    actual = _results(torch.compile(run, backend="aot_eager", fullgraph=True), block, x)
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, name)


OFFSETS = {
    "an expert without rows": [0, 2, 2, 7],
    "rows behind the last": [0, 2, 3, 5],
    "no rows": [0, 0, 0, 0],
    "no expert": [0],
}


@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
def test_grouped_linear_is_a_linear_map_per_expert(offsets: list[int]) -> None:
    num_experts = len(offsets) - 1
    rows = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(num_experts, 3, 4, dtype=torch.float64, requires_grad=True)
    given = torch.tensor(offsets, dtype=torch.int32)
    out = grouped_linear(rows, weight, given)
    expected = torch.zeros(7, 3, dtype=torch.float64)
    for expert in range(num_experts):
        span = slice(offsets[expert], offsets[expert + 1])
        expected[span] = rows.detach()[span] @ weight.detach()[expert].t()
    torch.testing.assert_close(out, expected)
    torch.autograd.gradcheck(lambda rows, weight: grouped_linear(rows, weight, given), (rows, weight))
    torch.library.opcheck(grouped_linear, (rows, weight, given))
    grad = torch.randn(7, 3, dtype=torch.float64)
    torch.library.opcheck(grouped_linear_backward, (grad, rows.detach(), weight.detach(), given))


def test_counts_and_offsets_give_the_same_bits() -> None:
    torch.manual_seed(0)
    experts = moe_ep.MoELayer(layer_config()).experts
    rows = torch.randn(12, HIDDEN)
    offsets = torch.tensor([0, 3, 3, 5, 6, 6, 10, 11, 12], dtype=torch.int32)
    results = []
    for arguments in ((offsets.diff().tolist(), None), (None, offsets)):
        leaf = rows.clone().requires_grad_()
        y = experts(leaf, *arguments)
        grads = torch.autograd.grad(y.square().sum(), (leaf, *experts.parameters()))
        results.append((y.detach(), *grads))
    for by_counts, by_offsets in zip(*results, strict=True):
        assert_same_bits(by_offsets, by_counts, "experts")


@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 3], dtype=torch.int32)])
def test_neither_counts_nor_offsets_is_refused(offsets: Tensor | None) -> None:
    experts = moe_ep.MoELayer(layer_config()).experts
    with pytest.raises(ValueError, match=r"tokens_per_expert is None and expert_offsets .*8 counts, or \[9\] offsets"):
        experts(torch.randn(3, HIDDEN), None, offsets)
