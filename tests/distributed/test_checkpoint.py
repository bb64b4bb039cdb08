"""Checkpoints: global expert names, any EP size on load, and nothing half loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from moe_ep.parallel import reduce_gradients
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import device_of


def _config(num_experts: int = 4, hidden: int = 8, backend: str = "auto") -> MoEConfig:
    router = RouterConfig(topk=2, score_function="sigmoid", expert_bias=True)
    return MoEConfig(
        hidden_size=hidden,
        ffn_hidden_size=6,
        num_experts=num_experts,
        shared_ffn_hidden_size=4,
        router=router,
        ep=EPConfig(exact=True, backend=backend),  # so that y has the same bits at every EP size
    )


def _fill(layer: moe_ep.MoELayer) -> None:
    """Expert e gets e + 1 everywhere; the bias numbers that bfloat16 cannot hold."""
    with torch.no_grad():
        for place, expert in enumerate(layer.experts.expert_ids):
            for parameter in layer.experts.parameters():
                parameter[place] = expert + 1.0
        assert layer.router.expert_bias is not None
        layer.router.expert_bias.copy_(torch.tensor([0.003, -0.001, 0.0, -0.002]))


def _steps(layer: moe_ep.MoELayer, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    rank = layer.buffer.rank
    for step in range(num_steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        x = x.to(layer.router.weight.device)
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        reduce_gradients(layer.parameters(), layer.buffer.group)
        optimizer.step()
        layer.update_expert_bias()


def save(group: dist.ProcessGroup, path: str, backend: str = "auto") -> None:
    torch.manual_seed(3)
    layer = moe_ep.MoELayer(_config(backend=backend), group).to(device_of(backend))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    _steps(layer, optimizer, 2)
    _fill(layer)
    moe_ep.save_checkpoint(path, layer, optimizer, {"step": 2}, group)
    layer.buffer.close()


def load(group: dist.ProcessGroup, path: str, backend: str = "auto") -> dict[str, Tensor]:
    torch.manual_seed(99)
    layer = moe_ep.MoELayer(_config(backend=backend), group).to(device_of(backend), torch.bfloat16)
    layer.experts.float()
    layer.router.float()
    layer.shared_experts.float()  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    assert moe_ep.load_checkpoint(path, layer, optimizer, group) == {"step": 2}
    for place, expert in enumerate(layer.experts.expert_ids):
        for parameter in layer.experts.parameters():
            assert bool((parameter[place] == expert + 1.0).all()), f"expert {expert}"
            assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    assert layer.router.expert_bias is not None
    assert layer.router.expert_bias.dtype == torch.float32
    assert torch.equal(layer.router.expert_bias.cpu(), torch.tensor([0.003, -0.001, 0.0, -0.002]))  # case M03
    x = torch.linspace(-1, 1, 3 * 8).reshape(3, 8).to(device_of(backend))
    y = layer(x if layer.buffer.rank == 0 else x[:0])  # one batch for the group, so that the GEMMs are the same
    moments = {
        f"{expert}.{name}.{key}": optimizer.state[parameter][key][place]
        for place, expert in enumerate(layer.experts.expert_ids)
        for name, parameter in layer.experts.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
    layer.buffer.close()
    return moments | ({"y": y.detach()} if len(y) else {})


@pytest.mark.parametrize("saved_at", [1, 2, 4])
def test_a_checkpoint_loads_at_every_ep_size(ranks: Pools, tmp_path: Path, saved_at: int) -> None:  # case M01
    path = str(tmp_path / "ckpt")
    assert_loads(ranks, path, saved_at, (1, 2, 4))


def assert_loads(ranks: Pools, path: str, saved_at: int, worlds: tuple[int, ...], backend: str = "auto") -> None:
    """Saved at one EP size and loaded at others: the same values, moments and outputs."""
    ranks.run(save, saved_at, path, backend)
    results = {world: ranks.run(load, world, path, backend) for world in worlds}
    reference = results[1][0]
    for by_rank in results.values():
        for result in by_rank:
            for name, tensor in result.items():
                assert torch.equal(tensor, reference[name]), name


def straight_and_resumed(group: dist.ProcessGroup, path: str, backend: str = "auto") -> None:
    """4 steps, against 2 steps, save, load into a fresh layer, 2 more: the same bits (case M04)."""
    torch.manual_seed(3)
    straight = moe_ep.MoELayer(_config(backend=backend), group).to(device_of(backend))
    optimizer = torch.optim.AdamW(straight.parameters(), lr=1e-2)
    _steps(straight, optimizer, 2)
    moe_ep.save_checkpoint(path, straight, optimizer, {"step": 2}, group)
    torch.manual_seed(4)
    resumed = moe_ep.MoELayer(_config(backend=backend), group).to(device_of(backend))
    other = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    moe_ep.load_checkpoint(path, resumed, other, group)
    _steps(straight, optimizer, 2)
    _steps(resumed, other, 2)
    for (name, ours), theirs in zip(resumed.state_dict().items(), straight.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    straight.buffer.close()
    resumed.buffer.close()


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_has_the_bits_of_a_straight_one(ranks: Pools, tmp_path: Path, world: int) -> None:
    ranks.run(straight_and_resumed, world, str(tmp_path / "ckpt"))


@pytest.mark.filterwarnings("error")
def test_one_process_without_a_group_stores_and_loads_without_a_warning(tmp_path: Path) -> None:
    layer = moe_ep.MoELayer(_config())
    moe_ep.save_checkpoint(tmp_path / "ckpt", layer, extra={"step": 3})
    assert moe_ep.load_checkpoint(tmp_path / "ckpt", layer) == {"step": 3}


@pytest.mark.parametrize(  # case M05
    ("num_experts", "hidden", "sentence"),
    [
        (8, 8, r"nothing was changed. Missing in the file: model\.experts\.4\.down"),
        (2, 8, r"Unknown here: model\.experts\.2\.down"),
        (4, 16, r"model\.experts\.0\.down is \[8, 6\] in the file and \[16, 6\] here"),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(
    tmp_path: Path, num_experts: int, hidden: int, sentence: str
) -> None:
    moe_ep.save_checkpoint(tmp_path / "ckpt", moe_ep.MoELayer(_config()))
    other = moe_ep.MoELayer(_config(num_experts, hidden))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match=sentence):
        moe_ep.load_checkpoint(tmp_path / "ckpt", other)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_folder_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        moe_ep.load_checkpoint(tmp_path, moe_ep.MoELayer(_config()))
