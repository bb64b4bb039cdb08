"""Five steps in DistributedDataParallel on an EP x DP mesh end where one process with the whole batch ends.

The model and the training of this file serve the tests of the other wrappers too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moe_ep
from moe_ep.config import MoEConfig, RouterConfig
from moe_ep.layers.wrap import keep_exchange_contexts, wrap_ddp
from moe_ep.parallel import clip_grad_norm, reduce_gradients, split_parameters
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import device_of

HIDDEN, SEQUENCES, LENGTH, STEPS = 16, 8, 8, 5  # powers of two: the balance losses divide without rounding
MAX_NORM = 0.05  # far below the norms that occur, so that every step is clipped
EP_SIZES = (2, 4, 1)  # of 4 ranks: EP x DP = 2x2, 4x1, 1x4


class Block(nn.Module):
    """x + MoE(LayerNorm(x)), with sigmoid scores, a shared expert, a bias and two balance losses."""

    def __init__(self, buffer: moe_ep.Buffer, recompute: bool) -> None:
        super().__init__()
        router = RouterConfig(
            topk=2,
            score_function="sigmoid",
            normalize=True,
            expert_bias=True,
            bias_update_rate=0.25,
            seq_aux_loss_coef=0.5,
            z_loss_coef=0.25,
        )
        config = MoEConfig(
            hidden_size=HIDDEN,
            ffn_hidden_size=8,
            num_experts=8,
            shared_ffn_hidden_size=8,
            init_std=0.3,
            router=router,
        )
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = moe_ep.MoELayer(config, buffer.group, buffer=buffer)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            y: Tensor = checkpoint(self._forward, x, use_reentrant=False, context_fn=keep_exchange_contexts)
            return y
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    """Two blocks that share a buffer between two linear maps; the same values on any number of ranks."""

    def __init__(self, ep_group: dist.ProcessGroup | None, recompute: bool = False, backend: str = "auto") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        buffer = moe_ep.Buffer(ep_group, backend=backend, timeout_secs=30)
        self.blocks = nn.ModuleList(Block(buffer, recompute) for _ in range(2))
        self.to(device_of(backend), torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y

    def layers(self) -> list[moe_ep.MoELayer]:
        return [child for child in self.modules() if isinstance(child, moe_ep.MoELayer)]


@dataclass(frozen=True)
class Wrapped:
    """A model in a wrapper, and what the wrapper asks for around a step."""

    forward: nn.Module
    model: Model
    sync: Callable[[bool], AbstractContextManager[None]]  # entered around each pass: is it the last of its step?
    reduce: Callable[[], None]  # called after the last backward of a step
    clip: Callable[[], Tensor]
    bias_group: dist.ProcessGroup | None


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, [B, S, H], and its targets."""
    g = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, SEQUENCES, LENGTH, HIDDEN, generator=g, dtype=torch.float64)
    return x, target


def train(wrapped: Wrapped, rank: int, world: int, num_passes: int) -> list[float]:
    """Trains on this rank's share of every batch, in `num_passes` passes a step; the norms before clipping."""
    replicated, experts = split_parameters(wrapped.model)
    optimizer = torch.optim.AdamW([{"params": replicated}, {"params": experts}], lr=1e-2, weight_decay=0.1)
    share = SEQUENCES // world // num_passes
    device = wrapped.model.last.weight.device
    norms = []
    for layer in wrapped.model.layers():
        layer.router.aux_loss_scale = 1 / num_passes
    for step in range(STEPS):
        x, target = (tensor.to(device) for tensor in batch(step))
        optimizer.zero_grad()
        for i in range(num_passes):
            begin = (rank * num_passes + i) * share
            mine = slice(begin, begin + share)
            with wrapped.sync(i == num_passes - 1):
                loss = (wrapped.forward(x[mine]) - target[mine]).square().mean()
                (loss / num_passes).backward()
        wrapped.reduce()
        norms.append(float(wrapped.clip()))
        optimizer.step()
        for layer in wrapped.model.layers():
            layer.update_expert_bias(wrapped.bias_group)
    return norms


def one_process() -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and norms of the whole batch in one process, with PyTorch's own clipping."""
    model = Model(None)

    def clip() -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    norms = train(Wrapped(model, model, lambda _: nullcontext(), lambda: None, clip, None), 0, 1, 1)
    assert min(norms) > MAX_NORM
    return model.state_dict(), norms


def make_meshes(ep_size: int, device: str = "cpu") -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """All ranks; this rank's EP group; the ranks that hold the same experts."""
    world = dist.get_world_size()
    grid = init_device_mesh(device, (world // ep_size, ep_size), mesh_dim_names=("dp", "ep"))
    return init_device_mesh(device, (world,)), grid["ep"], grid["dp"]


def check_against_one_process(results: list[tuple[dict[str, Tensor], list[float]]], rtol: float = 1e-10) -> None:
    """All ranks that hold a tensor hold the same bits, within `rtol` of one process's; none is missing."""
    expected, expected_norms = one_process()
    found: dict[str, Tensor] = {}
    for state, norms in results:
        assert norms == pytest.approx(expected_norms, rel=rtol)
        for name, tensor in state.items():
            assert_same_bits(tensor, found.setdefault(name, tensor), name)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=rtol, atol=1e-15, msg=name)
    assert not torch.equal(found["blocks.0.moe.router.expert_bias"], torch.zeros(8))


def train_in_ddp(
    group: dist.ProcessGroup, ep_size: int, num_passes: int, recompute: bool, backend: str = "auto"
) -> tuple[dict[str, Tensor], list[float]]:
    world, ep, expert_dp = (mesh.get_group() for mesh in make_meshes(ep_size, device_of(backend)))
    model = Model(ep, recompute, backend)
    wrapped = wrap_ddp(model, world)
    experts = split_parameters(model)[1]

    def sync(last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else wrapped.no_sync()  # type: ignore[no-untyped-call]

    def reduce() -> None:
        reduce_gradients(experts, world, expert_dp)

    def clip() -> Tensor:
        return clip_grad_norm(model.parameters(), MAX_NORM, ep)

    norms = train(
        Wrapped(wrapped, model, sync, reduce, clip, world), dist.get_rank(world), dist.get_world_size(world), num_passes
    )
    model.layers()[0].buffer.close()
    return model.state_dict(), norms


@pytest.mark.world_size(4)
@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize(("num_passes", "recompute"), [(1, False), (2, False), (2, True)])
def test_five_steps_in_ddp_equal_one_process(ranks: Pools, ep_size: int, num_passes: int, recompute: bool) -> None:
    """Cases L01, L03, L04 and, by bias steps under accumulation and selective recompute, B01."""
    check_against_one_process(ranks.run(train_in_ddp, 4, ep_size, num_passes, recompute))


def _what_ddp_holds(group: dist.ProcessGroup) -> None:
    model = Model(make_meshes(2)[1].get_group())
    wrapped: DistributedDataParallel = wrap_ddp(model, group)
    replicated, experts = split_parameters(model)
    assert len(experts) == 4
    assert {id(p) for p in replicated} | {id(p) for p in experts} == {id(p) for p in model.parameters()}
    ignored = wrapped.parameters_to_ignore
    assert {name for name, p in model.named_parameters() if any(p is e for e in experts)} <= ignored
    assert "blocks.1.moe.router.tokens_per_expert" in ignored
    assert "blocks.1.moe.router.expert_bias" not in ignored  # equal on all ranks, and kept so
    wrapped(batch(0)[0][:1]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.layers()[0].buffer.close()


@pytest.mark.world_size(4)
def test_ddp_leaves_experts_and_counters_alone(ranks: Pools) -> None:
    ranks.run(_what_ddp_holds, 4)


PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _snippet(group: dist.ProcessGroup, place: int) -> None:
    names: dict[str, Any] = {}
    for code in (SNIPPETS[0], SNIPPETS[place]):
        exec(compile(code, PAGE.name, "exec"), names)
    assert 0 < names.get("norm", 1.0) < float("inf")
    names["buffer"].close()


@pytest.mark.world_size(4)
@pytest.mark.parametrize("place", range(1, len(SNIPPETS)))
def test_the_snippets_of_the_page_run(ranks: Pools, place: int) -> None:
    ranks.run(_snippet, 4, place)
