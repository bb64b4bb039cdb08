"""FSDP2: dense parameters sharded over all ranks, experts over those that hold the same ones; gloo on CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from moe_ep.layers.wrap import wrap_fsdp
from moe_ep.parallel import clip_grad_norm, is_expert, reduce_gradients, split_parameters
from tests.distributed.test_wrappers_ddp import (
    EP_SIZES,
    MAX_NORM,
    Model,
    Wrapped,
    batch,
    check_against_one_process,
    make_meshes,
    train,
)
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import device_of


def _sharded(ep_size: int, recompute: bool = False, backend: str = "auto") -> tuple[Model, DeviceMesh]:
    """The model in FSDP2 and this rank's EP mesh."""
    world, ep, expert_dp = make_meshes(ep_size, device_of(backend))
    model = Model(ep.get_group(), recompute, backend)
    wrap_fsdp(model, world, expert_dp, blocks=model.blocks)
    return model, ep


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with dense tensors put together; of the experts, those of this rank's shard. Collective."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}


def train_in_fsdp(
    group: dist.ProcessGroup, ep_size: int, num_passes: int, recompute: bool, backend: str = "auto"
) -> tuple[dict[str, Tensor], list[float]]:
    model, ep = _sharded(ep_size, recompute, backend)

    def sync(last: bool) -> AbstractContextManager[None]:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    def clip() -> Tensor:
        return clip_grad_norm(model.parameters(), MAX_NORM, ep.get_group())

    wrapped = Wrapped(model, model, sync, lambda: None, clip, group)
    norms = train(wrapped, dist.get_rank(group), dist.get_world_size(group), num_passes)
    model.layers()[0].buffer.close()
    return _whole(model), norms


@pytest.mark.world_size(4)
@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize(("num_passes", "recompute"), [(1, False), (2, False), (2, True)])
def test_five_steps_in_fsdp2_equal_one_process(ranks: Pools, ep_size: int, num_passes: int, recompute: bool) -> None:
    """Cases L01, L03, L04 and, by bias steps under accumulation and selective recompute, B01."""
    check_against_one_process(ranks.run(train_in_fsdp, 4, ep_size, num_passes, recompute))


def _placement(group: dist.ProcessGroup) -> None:
    model, _ = _sharded(2)
    replicated, experts = split_parameters(model)
    assert len(experts) == 4  # FSDP2 makes new parameters; the mark of the experts must reach them
    assert {p.device_mesh.size() for p in replicated if isinstance(p, DTensor)} == {4}
    assert {p.device_mesh.size() for p in experts if isinstance(p, DTensor)} == {2}
    with pytest.raises(ValueError, match="are DTensors, whose gradients FSDP2 has reduced in backward"):
        reduce_gradients(model.parameters(), group)
    model.layers()[0].buffer.close()


@pytest.mark.world_size(4)
def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones(ranks: Pools) -> None:
    ranks.run(_placement, 4)


def save_and_load(group: dist.ProcessGroup, ep_size: int, backend: str = "auto") -> None:
    expected = Model(None).state_dict()
    model, _ = _sharded(ep_size, backend=backend)
    state = model.state_dict()
    held = [name for name in state if ".experts." in name]
    # two blocks, two weights, the eight experts spread over the ranks
    assert len(held) == 2 * 2 * 8 // dist.get_world_size(group)
    for name in held:
        assert_same_bits(state[name], expected[name], name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    own = {name: t for name, t in state.items() if ".experts." not in name}
    model.load_state_dict({**own, **{name: t for name, t in expected.items() if ".experts." in name}})
    for name in held:
        assert_same_bits(model.state_dict()[name], expected[name], name)
    assert all(is_expert(p) for layer in model.layers() for p in layer.experts.parameters())
    model.layers()[0].buffer.close()


@pytest.mark.world_size(4)
@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_a_shard_saves_and_loads_its_experts_under_their_global_ids(ranks: Pools, ep_size: int) -> None:  # case M01
    ranks.run(save_and_load, 4, ep_size)


def stored(
    group: dist.ProcessGroup, path: Path, ep_sizes: tuple[int, int], backend: str = "auto"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model as it was saved at one EP size and as it was loaded at another."""
    saved, _ = _sharded(ep_sizes[0], backend=backend)
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.mul_(1.5)
    dcp.save(saved.state_dict(), checkpoint_id=path, process_group=group)
    loaded, _ = _sharded(ep_sizes[1], backend=backend)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=path, process_group=group)
    loaded.load_state_dict(state)
    for model in (saved, loaded):
        model.layers()[0].buffer.close()
    return _whole(saved), _whole(loaded)


@pytest.mark.world_size(4)
def test_a_stored_state_dict_loads_at_another_ep_size(ranks: Pools, tmp_path: Path) -> None:  # case M01
    assert_stored(ranks.run(stored, 4, tmp_path, (2, 4)))


def assert_stored(results: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
    """What the ranks loaded is what they saved, all of it."""
    saved = {name: tensor for before, _ in results for name, tensor in before.items()}
    loaded = {name: tensor for _, after in results for name, tensor in after.items()}
    assert saved.keys() == loaded.keys() == Model(None).state_dict().keys()
    for name, tensor in saved.items():
        assert_same_bits(loaded[name], tensor, name)


def _drawn_again(group: dist.ProcessGroup) -> None:
    model, _ = _sharded(2)
    torch.manual_seed(5)
    plain = Model(None)
    for sharded, whole in zip(model.layers(), plain.layers(), strict=True):
        for experts in (sharded.experts, whole.experts):
            torch.manual_seed(5)
            experts.reset_parameters()
        expected = whole.experts.state_dict()
        for name, weight in sharded.experts.state_dict().items():
            assert_same_bits(weight, expected[name], name)
    model.layers()[0].buffer.close()


@pytest.mark.world_size(4)
def test_experts_drawn_after_sharding_have_the_values_of_one_process(ranks: Pools) -> None:
    ranks.run(_drawn_again, 4)


def gathered_in_bfloat16(group: dist.ProcessGroup, backend: str = "auto") -> None:
    world, ep, expert_dp = make_meshes(2, device_of(backend))
    model = Model(ep.get_group(), backend=backend).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap_fsdp(model, world, expert_dp, blocks=model.blocks, mp_policy=policy)
    model(batch(0)[0][:2].float().to(device_of(backend))).float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert bool(parameter.grad.to_local().isfinite().all()), name  # type: ignore[attr-defined]
    model.layers()[0].buffer.close()


@pytest.mark.world_size(4)
def test_parameters_may_be_gathered_in_bfloat16(ranks: Pools) -> None:
    ranks.run(gathered_in_bfloat16, 4)
