"""MoELayer against the dense float64 oracle, at every EP size, values and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moe_ep
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from moe_ep.reference import dense_moe
from tests.helpers.compare import assert_close, assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import device_of

HIDDEN, NUM_EXPERTS = 16, 8
TOKENS = (5, 0, 9, 2, 1, 7, 0, 3)  # of rank r, cycled


def layer_config(**changes: Any) -> MoEConfig:
    """Sigmoid, groups, shared expert, no balance loss (that one depends on which rank holds a token)."""
    router = RouterConfig(
        topk=3, score_function="sigmoid", normalize=True, scaling_factor=1.5, num_groups=4, group_topk=2
    )
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 12,
        "num_experts": NUM_EXPERTS,
        "shared_ffn_hidden_size": 8,
        "init_std": 0.3,
        "router": router,
        "ep": EPConfig(timeout_secs=20),
    }
    return MoEConfig(**(settings | changes))


def all_tokens(world: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(TOKENS[rank % len(TOKENS)], HIDDEN, generator=g, dtype=torch.float64) for rank in range(world)]


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def oracle_gradients(full: dict[str, Tensor], idx: Tensor, x: Tensor, rank_of_token: Tensor) -> dict[str, Tensor]:
    """y, dx and the gradient of every weight for loss = sum over ranks of (rank + 1) * <y, y> / 2, in float64."""
    leaves = {name: t.detach().double().clone().requires_grad_() for name, t in full.items()}
    x = x.double().clone().requires_grad_()
    scores = torch.sigmoid(x @ leaves["router.weight"].t()).gather(1, idx)
    weights = 1.5 * scores / scores.sum(1, keepdim=True)
    experts = [
        lambda v, e=e: _swiglu(v, leaves[f"experts.{e}.gate_up"], leaves[f"experts.{e}.down"])
        for e in range(NUM_EXPERTS)
    ]
    y = dense_moe(x, idx, weights, experts)
    y = y + _swiglu(x, leaves["shared_experts.gate_up.weight"], leaves["shared_experts.down.weight"])
    ((rank_of_token + 1).unsqueeze(1) * y.square()).sum().div(2).backward()
    grads = {name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for name, leaf in leaves.items()}
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **grads}


def against_oracle(
    group: dist.ProcessGroup, dtype: torch.dtype, alignment: int, exact: bool, mode: str, backend: str = "auto"
) -> None:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    ep = EPConfig(timeout_secs=20, alignment=alignment, exact=exact, backend=backend)
    device = device_of(backend)
    torch.manual_seed(0)
    layer = moe_ep.MoELayer(layer_config(ep=ep), group).to(device, dtype)
    torch.manual_seed(0)
    full = moe_ep.MoELayer(layer_config()).to(dtype).state_dict()  # one rank with all experts, the same values
    tokens = all_tokens(world)
    x = tokens[rank].to(device, dtype, copy=True).requires_grad_()
    if mode == "plain":
        y = layer(x)
    else:
        y = checkpoint(layer, x, use_reentrant=mode == "reentrant")
    ((rank + 1) * y.square().sum() / 2).backward()

    x_all = torch.cat(tokens).to(dtype)
    idx = layer.router(x_all.to(device))[0].cpu()
    rank_of_token = torch.cat([torch.full((len(t),), r) for r, t in enumerate(tokens)])
    expected = oracle_gradients(full, idx, x_all, rank_of_token)
    mine = rank_of_token == rank
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}[dtype]
    assert_close(y, expected["y"][mine], tolerance * 5, "y")
    assert_close(x.grad, expected["x"][mine], tolerance * 5, "dx")  # type: ignore[arg-type]
    for place, expert in enumerate(layer.experts.expert_ids):
        for name in ("gate_up", "down"):
            grad = getattr(layer.experts, name).grad
            assert grad is not None, f"expert {expert} has no gradient"
            assert_close(grad[place], expected[f"experts.{expert}.{name}"], tolerance * 20, f"experts.{expert}.{name}")
    for name in ("router.weight", "shared_experts.gate_up.weight", "shared_experts.down.weight"):
        grad = layer.get_parameter(name).grad
        assert grad is not None
        grad = grad.cpu()
        dist.all_reduce(grad, group=group)  # replicated: each rank holds its tokens' part
        assert_close(grad, expected[name], tolerance * 20, name)
    layer.buffer.close()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("dtype", "alignment", "exact"), [(torch.float64, 1, False), (torch.float32, 4, True)])
def test_layer_and_all_gradients_equal_the_dense_oracle(
    ranks: Pools, dtype: torch.dtype, alignment: int, exact: bool, world: int
) -> None:
    ranks.run(against_oracle, world, dtype, alignment, exact, "plain")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_recompute_changes_no_gradient(ranks: Pools, mode: str, world: int) -> None:  # case A06
    ranks.run(against_oracle, world, torch.float64, 1, False, mode)


def _exact_bits(group: dist.ProcessGroup) -> list[Tensor]:
    """y of 12 tokens in bfloat16 with scale experts; the tokens are split evenly over the ranks."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    g = torch.Generator().manual_seed(7)
    x = torch.randn(12, 8, generator=g).bfloat16()
    idx = torch.stack([torch.randperm(24, generator=g)[:8] for _ in range(12)])
    weights = torch.rand(12, 8, generator=g)
    share = slice(rank * 12 // world, (rank + 1) * 12 // world)
    scale = torch.linspace(0.5, 2.0, 24).bfloat16()
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        out = moe_ep.dispatch(buffer, x[share], idx[share], weights[share], num_experts=24)
        mine = scale[list(buffer.placement(24).experts_of(buffer.rank))]
        rows = mine[out.topk_idx].unsqueeze(1) * out.x
        return [moe_ep.combine(buffer, rows, out.handle, out.topk_weights, exact=exact) for exact in (True, False)]


def test_exact_sums_have_the_same_bits_at_every_ep_size(ranks: Pools) -> None:
    by_world = {world: ranks.run(_exact_bits, world) for world in (1, 2, 3, 4)}
    exact = {world: torch.cat([result[0] for result in results]) for world, results in by_world.items()}
    plain = {world: torch.cat([result[1] for result in results]) for world, results in by_world.items()}
    for world in (2, 3, 4):
        assert_same_bits(exact[world], exact[1], f"exact sum at W = {world}")
    assert not torch.equal(plain[4], plain[1])  # so the inputs do tell the two apart


def _autocast(group: dist.ProcessGroup, x_dtype: torch.dtype, backward_inside: bool) -> None:
    torch.manual_seed(0)
    layer = moe_ep.MoELayer(layer_config(), group)
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1)).to(x_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        if backward_inside:
            y.float().square().sum().backward()
    if not backward_inside:
        y.float().square().sum().backward()
    assert y.dtype == x_dtype
    assert x.grad is not None
    assert x.grad.dtype == x_dtype
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert bool(parameter.grad.isfinite().all()), name
    layer.buffer.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_keeps_the_dtypes_of_x_and_parameters(  # case N02
    ranks: Pools, x_dtype: torch.dtype, backward_inside: bool, world: int
) -> None:
    ranks.run(_autocast, world, x_dtype, backward_inside)


def _two_layers_interleaved(group: dist.ProcessGroup) -> None:
    """Two layers share a buffer; three forwards are in flight; their backwards run in another order."""
    rank = dist.get_rank(group)
    buffer = moe_ep.Buffer(group, timeout_secs=20)
    torch.manual_seed(0)
    layers = [moe_ep.MoELayer(layer_config(), group, buffer=buffer).double() for _ in range(2)]
    g = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(3 + rank + i, HIDDEN, generator=g, dtype=torch.float64) for i in range(3)]
    alone = []
    for i, x in enumerate(inputs):
        leaf = x.clone().requires_grad_()
        layers[i % 2](leaf).square().sum().backward()
        alone.append(leaf.grad)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = [layers[i % 2](leaf) for i, leaf in enumerate(leaves)]
    for i in (1, 2, 0):
        outputs[i].square().sum().backward()
    for i in range(3):
        assert_same_bits(leaves[i].grad, alone[i], f"dx of forward {i}")  # type: ignore[arg-type]
    buffer.close()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_two_layers_on_one_buffer_with_three_forwards_in_flight(ranks: Pools, world: int) -> None:
    ranks.run(_two_layers_interleaved, world)


def _frozen_somewhere(group: dist.ProcessGroup, frozen: str) -> None:
    """Ranks differ in what needs a gradient; the others' gradients must not change, and nobody may wait."""
    rank = dist.get_rank(group)
    grads = []
    for freeze in (False, True):
        torch.manual_seed(0)
        layer = moe_ep.MoELayer(layer_config(), group).double()
        x = all_tokens(2)[0].clone().requires_grad_()
        if freeze and rank == 1:
            if frozen in ("x", "all"):
                x.requires_grad_(False)
            if frozen in ("router", "all"):
                layer.router.requires_grad_(False)
            if frozen in ("experts", "all"):
                layer.experts.requires_grad_(False)
            if frozen == "all":
                layer.shared_experts.requires_grad_(False)  # type: ignore[union-attr]
        layer(x).square().sum().backward()
        grads.append({"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
        layer.buffer.close()
    for name, grad in grads[1].items():
        if grad is not None:
            assert_same_bits(grad, grads[0][name], name)  # type: ignore[arg-type]
    if rank == 0:
        assert all(grad is not None for grad in grads[1].values())


@pytest.mark.parametrize("frozen", ["x", "router", "experts", "all"])
def test_ranks_may_differ_in_what_needs_a_gradient(ranks: Pools, frozen: str) -> None:
    ranks.run(_frozen_somewhere, 2, frozen)


def _copied(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    layer = moe_ep.MoELayer(layer_config(), group)
    twin = copy.deepcopy(layer)
    x = torch.ones(2, HIDDEN)
    before = layer(x)
    assert_same_bits(twin(x), before, "y of the copy")
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert_same_bits(layer(x), before, "y of the original")
    assert twin.experts.down.allreduce is False
    layer.buffer.close()


@pytest.mark.parametrize("world", [1, 2])
def test_a_deep_copy_shares_the_group_and_owns_its_parameters(ranks: Pools, world: int) -> None:  # case P09, first part
    ranks.run(_copied, world)


def _scaled(group: dist.ProcessGroup) -> None:
    outputs = []
    for factor in (1.0, 2.5):
        router = RouterConfig(topk=2, score_function="sigmoid", normalize=True, scaling_factor=factor)
        torch.manual_seed(0)
        layer = moe_ep.MoELayer(layer_config(router=router, shared_ffn_hidden_size=None), group).double()
        outputs.append(layer(all_tokens(1)[0]))
        layer.buffer.close()
    torch.testing.assert_close(outputs[1], 2.5 * outputs[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("world", [1, 2])
def test_the_scaling_factor_scales_y_once(ranks: Pools, world: int) -> None:  # case G06, end to end
    ranks.run(_scaled, world)


def test_a_layer_of_two_ranks_without_a_group_names_init_process_group() -> None:  # case P01
    with pytest.raises(moe_ep.ConfigError, match=r"ep.size is 2.*init_process_group"):
        moe_ep.MoELayer(layer_config(ep=EPConfig(size=2)))
    assert moe_ep.MoELayer(layer_config(ep=EPConfig(size=1)))(torch.ones(1, HIDDEN)).shape == (1, HIDDEN)


@pytest.mark.parametrize(  # case C05
    ("changes", "sentence"),
    [
        ({"ep": EPConfig(backend="intranode")}, "backend is 'intranode', but "),
        (
            {"fp8": {"recipe": "blockwise"}, "ffn_hidden_size": 16},
            "moe.fp8.recipe is 'blockwise'.*set moe.fp8.recipe to none",
        ),
    ],
)
def test_what_is_asked_for_and_missing_is_refused_not_replaced(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(moe_ep.ConfigError, match=sentence):
        moe_ep.MoELayer(layer_config(**changes))
    assert moe_ep.MoELayer(layer_config()).buffer.backend_name == "torch"  # what "auto" chose can be read


@pytest.mark.parametrize("shape", [(7, HIDDEN), (2, 3, HIDDEN), (HIDDEN,), (0, HIDDEN), (2, 0, HIDDEN)])
def test_y_has_the_shape_of_x(shape: tuple[int, ...]) -> None:
    assert moe_ep.MoELayer(layer_config())(torch.ones(shape)).shape == shape


def test_a_wrong_hidden_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"\[3, 15\].*hidden_size = 16"):
        moe_ep.MoELayer(layer_config())(torch.ones(3, 15))
