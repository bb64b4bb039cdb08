"""Experts in FP8 over ranks, on the plain products: the code of the GPU but for the GEMM. Cases F01, F02 and F08.

Letters: T tokens, H hidden, F ffn width, K slots a token, E experts, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moe_ep
from moe_ep.config import EPConfig, FP8Config, MoEConfig, RouterConfig
from moe_ep.fp8.matrix import Fp8Matrix
from moe_ep.layers.fp8.gemm import PlainGemm
from tests.helpers.compare import assert_same_bits
from tests.helpers.fp8_oracle import relative_error, swiglu_moe
from tests.helpers.ranks import Pools

HIDDEN, FFN, EXPERTS, TOPK, TOKENS = 256, 192, 6, 2, 40
NAMES = ("y", "dx", "dw", "gate_up", "down")


def fp8_config(backend: str = "auto", **fp8: Any) -> MoEConfig:
    return MoEConfig(
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_experts=EXPERTS,
        router=RouterConfig(topk=TOPK, normalize=True),
        init_std=0.05,
        ep=EPConfig.model_validate({"backend": backend}),
        fp8=FP8Config(**{"recipe": "blockwise", "gemm": "plain", **fp8}),
    )


def make_layer(group: dist.ProcessGroup, dtype: torch.dtype, **fp8: Any) -> moe_ep.MoELayer:
    torch.manual_seed(0)  # an expert's weights do not depend on who owns it
    return moe_ep.MoELayer(fp8_config(**fp8), group if dist.get_world_size(group) > 1 else None).to(dtype)


def share(group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's tokens, expert ids, weights and dy. Expert 4 gets nothing; token 2 goes nowhere, token 3 is zero."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    g = torch.Generator().manual_seed(7)
    x = torch.randn(TOKENS, HIDDEN, generator=g).to(dtype)
    idx = torch.randint(0, EXPERTS - 1, (TOKENS, TOPK), generator=g)
    idx[idx == 4] = 5
    weights = torch.rand(TOKENS, TOPK, generator=g) + 0.1
    dy = torch.randn(TOKENS, HIDDEN, generator=g).to(dtype)
    idx[2], x[3] = -1, 0
    mine = slice(rank, None, world)
    return x[mine], idx[mine], weights[mine], dy[mine]


def functional(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    fp8: dict[str, Any],
    device: str = "cpu",
    weighs_inside: bool = True,
) -> dict[str, Tensor]:
    """One forward and backward of dispatch_fp8, experts and combine; weights' gradients by global expert id.

    The rows are weighed in the experts, or else in combine.
    """
    backend = "intranode" if device == "cuda" and dist.get_world_size(group) > 1 else "auto"
    layer = make_layer(group, dtype, backend=backend, **fp8).to(device)
    x, idx, weights, dy = (tensor.to(device) for tensor in share(group, dtype))
    x, weights = x.requires_grad_(), weights.requires_grad_()
    assert layer.experts.fp8 is not None
    cast = layer.experts.fp8.recipe.payload
    out = moe_ep.dispatch_fp8(layer.buffer, x, idx, weights, num_experts=EXPERTS, cast=cast)
    inside, after = (out.topk_weights, None) if weighs_inside else (None, out.topk_weights)
    rows = layer.experts(out.rows, out.tokens_per_expert, row_weights_R=inside)
    y = moe_ep.combine(layer.buffer, rows, out.handle, after)
    y.backward(dy)
    found: dict[str, Tensor] = {"y": y.detach(), "dx": x.grad, "dw": weights.grad}  # type: ignore[dict-item]
    found |= {name: parameter.grad for name, parameter in layer.experts.named_parameters()}  # type: ignore[misc]
    assert out.real_tokens_per_expert is not None
    found["real"] = torch.tensor(out.real_tokens_per_expert)
    found["padded"] = torch.tensor(out.tokens_per_expert)
    layer.buffer.close()
    return found


def gathered(by_rank: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tokens of all ranks in their old order, experts one behind the other."""
    world = len(by_rank)
    whole = {}
    for name in ("y", "dx", "dw"):
        first = by_rank[0][name]
        whole[name] = first.new_zeros(TOKENS, *first.shape[1:])
        for rank, found in enumerate(by_rank):
            whole[name][rank::world] = found[name]
    return whole | {name: torch.cat([found[name] for found in by_rank]) for name in ("gate_up", "down")}


def oracle(dtype: torch.dtype, power_of_two: bool, weighs_inside: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(0)
    experts = moe_ep.MoELayer(fp8_config()).to(dtype).experts
    g = torch.Generator().manual_seed(7)
    x = torch.randn(TOKENS, HIDDEN, generator=g).to(dtype)
    idx = torch.randint(0, EXPERTS - 1, (TOKENS, TOPK), generator=g)
    idx[idx == 4] = 5
    weights = torch.rand(TOKENS, TOPK, generator=g) + 0.1
    dy = torch.randn(TOKENS, HIDDEN, generator=g).to(dtype)
    idx[2], x[3] = -1, 0
    leaves = [
        t.detach().double().requires_grad_() for t in (x, weights, experts.get_parameter("gate_up"), experts.down)
    ]
    y = swiglu_moe(leaves[0], idx, leaves[1], leaves[2], leaves[3], power_of_two, weighs_inside)
    y.backward(dy.double())
    return dict(zip(NAMES, (y.detach(), *(leaf.grad for leaf in leaves)), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("weighs_inside", [True, False])
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_are_those_of_the_quantised_inputs_and_gradients_close_to_them(
    ranks: Pools, world: int, dtype: torch.dtype, power_of_two: bool, weighs_inside: bool
) -> None:
    by_rank = ranks.run(functional, world, dtype, {"power_of_two_scales": power_of_two}, "cpu", weighs_inside)
    found, expected = gathered(by_rank), oracle(dtype, power_of_two, weighs_inside)
    errors = {name: relative_error(found[name], expected[name]) for name in NAMES}
    assert errors["y"] <= 2e-2, errors
    assert max(errors.values()) <= 5e-2, errors
    if dtype == torch.float32:  # no rounding but that of the oracle; inside, dw is a sum over an FP8 product
        assert max(errors["y"], 0 if weighs_inside else errors["dw"]) <= 1e-5, errors
    assert not bool(found["y"][2:4].any())  # sent nowhere; a row of zeros
    assert not bool(found["dx"][2].any())
    assert not bool(found["gate_up"][4].any())  # no rows
    assert not bool(found["down"][4].any())
    # case F02: padded for the GEMM, reported without
    real, padded = (torch.cat([part[name] for part in by_rank]) for name in ("real", "padded"))
    assert int(real.sum()) == TOPK * (TOKENS - 1)
    assert padded.tolist() == [-(-count // 16) * 16 for count in real.tolist()]


@pytest.mark.parametrize("recipe", ["blockwise", "current", "delayed"])
def test_results_do_not_depend_on_the_number_of_ranks(ranks: Pools, recipe: str) -> None:
    """Rows, and with them y and dx, are the same; per-tensor gradients have a scale a rank."""
    one, three = (gathered(ranks.run(functional, w, torch.float32, {"recipe": recipe})) for w in (1, 3))
    for name in NAMES:
        error = relative_error(three[name], one[name])
        assert error <= (1e-5 if recipe == "blockwise" else 8e-2), (name, error)


@pytest.mark.parametrize(
    "fp8",
    [
        {"recipe": "current"},
        {"recipe": "delayed"},
        {"wgrad": "bf16"},
        {"recipe": "current", "power_of_two_scales": False},
    ],
)
def test_every_setting_stays_near_the_oracle(ranks: Pools, fp8: dict[str, Any]) -> None:
    """The oracle has blocks, the per-tensor recipes do not; their gradients are e5m2, which has one bit less."""
    found = gathered(ranks.run(functional, 2, torch.bfloat16, fp8))
    expected = oracle(torch.bfloat16, True)
    errors = {name: relative_error(found[name], expected[name]) for name in NAMES}
    forward, backward = (2e-2, 5e-2) if "recipe" not in fp8 else (1e-1, 1.2e-1)
    assert errors["y"] <= forward, errors
    assert max(errors.values()) <= backward, errors


# -- what runs in FP8 -------------------------------------------------------------------------------------------------


class Spy(PlainGemm):
    """Notes the dtypes and scalings of every product, and how many calls there were."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str, str]] = []
        self.num_calls = 0

    def __call__(self, a: Sequence[Fp8Matrix], b: Sequence[Fp8Matrix], outs: Sequence[Tensor]) -> None:
        self.num_calls += 1
        for left, right in zip(a, b, strict=True):
            entry = (str(left.data.dtype), left.scaling, str(right.data.dtype), right.scaling)
            self.seen += [entry] if not self.seen or self.seen[-1] != entry else []
        super().__call__(a, b, outs)


def _spied(group: dist.ProcessGroup, fp8: dict[str, Any]) -> tuple[int, list[tuple[str, str, str, str]]]:
    layer = make_layer(group, torch.bfloat16, **fp8)
    assert layer.experts.fp8 is not None
    layer.experts.fp8.gemm = spy = Spy()
    layer(share(group, torch.bfloat16)[0].requires_grad_()).sum().backward()
    layer.buffer.close()
    return spy.num_calls, spy.seen


E4M3, E5M2 = "torch.float8_e4m3fn", "torch.float8_e5m2"


@pytest.mark.parametrize("world", [1, 2])
def test_forward_dgrad_and_wgrad_of_both_projections_run_in_fp8(ranks: Pools, world: int) -> None:
    product, wgrad = (E4M3, "tiles", E4M3, "rows"), (E4M3, "rows", E4M3, "rows")
    for num_calls, seen in ranks.run(_spied, world, {}):
        assert num_calls == 6
        assert seen == [product, wgrad, product, wgrad]  # both forward and d_inner; d_down; d_rows; d_first
    for num_calls, seen in ranks.run(_spied, world, {"wgrad": "bf16"}):
        assert num_calls == 4
        assert seen == [product]
    whole, grads = (E4M3, "tensor", E4M3, "tensor"), (E4M3, "tensor", E5M2, "tensor")
    for num_calls, seen in ranks.run(_spied, world, {"recipe": "current"}):
        assert num_calls == 6
        assert seen == [whole, grads]


# -- the boundary of autograd -----------------------------------------------------------------------------------------


def _boundary(group: dist.ProcessGroup) -> None:
    layer = make_layer(group, torch.bfloat16)
    x, idx, weights, _ = share(group, torch.bfloat16)
    x = x.requires_grad_()
    out = moe_ep.dispatch_fp8(layer.buffer, x, idx, weights, num_experts=EXPERTS)
    assert out.rows.data.dtype == torch.float8_e4m3fn
    assert not out.rows.data.requires_grad
    assert not out.rows.scales.requires_grad
    assert out.rows.face.requires_grad
    assert out.rows.face.dtype == torch.bfloat16
    assert out.rows.face.untyped_storage().nbytes() == 2  # it carries a gradient, no rows
    assert bool(out.rows.face.isnan().all())
    rows = layer.experts(out.rows, out.tokens_per_expert)
    edges, nodes = [rows.grad_fn], set()
    while edges:
        node = edges.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            for metadata in node._input_metadata:
                assert metadata.dtype in (torch.bfloat16, torch.float32), metadata.dtype
            edges += [following for following, _ in node.next_functions]
    assert len(nodes) >= 3
    moe_ep.combine(layer.buffer, rows, out.handle).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.any())
    layer.buffer.close()


@pytest.mark.parametrize("world", [1, 2])
def test_no_fp8_tensor_is_in_the_graph_and_no_gradient_is_lost(ranks: Pools, world: int) -> None:
    ranks.run(_boundary, world)


def _straight_through(group: dist.ProcessGroup, with_recompute: bool, grad_dispatch: bool) -> None:
    """Identity experts, dy = 1/3."""
    from moe_ep.autograd.combine_fp8 import combine_fp8_grad

    world = dist.get_world_size(group)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(dist.get_rank(group))).bfloat16().requires_grad_()
    idx = torch.arange(5).unsqueeze(1) % world
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:

        def there_and_back(tokens: Tensor) -> Tensor:
            out = moe_ep.dispatch_fp8(buffer, tokens, idx, num_experts=world)
            come_home = combine_fp8_grad if grad_dispatch else moe_ep.combine
            y: Tensor = come_home(buffer, out.rows.dequantize(), out.handle)
            return y

        y = checkpoint(there_and_back, x, use_reentrant=False) if with_recompute else there_and_back(x)
        third = torch.full((5, 256), 1 / 3).bfloat16()
        y.backward(third)
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    if grad_dispatch:
        assert relative_error(x.grad, third) <= 2**-4
        assert not torch.equal(x.grad, third)  # rounded because it was asked for
    else:
        assert_same_bits(x.grad, third, "dx")


@pytest.mark.parametrize("grad_dispatch", [False, True])
@pytest.mark.parametrize("with_recompute", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_the_gradient_is_exact_unless_fp8_was_asked_for(
    ranks: Pools, world: int, with_recompute: bool, grad_dispatch: bool
) -> None:  # case F08
    ranks.run(_straight_through, world, with_recompute, grad_dispatch)


# -- the layer --------------------------------------------------------------------------------------------------------


def _trained(group: dist.ProcessGroup, fp8: dict[str, Any], with_recompute: bool) -> list[float]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    layer = make_layer(group, torch.float32, **fp8)
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(3)
    x, target = (torch.randn(48, HIDDEN, generator=g)[rank::world] for _ in range(2))
    losses = []
    for _ in range(8):
        y = checkpoint(layer, x, use_reentrant=False) if with_recompute else layer(x)
        loss = (y - target).square().mean()
        loss.backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            if name.startswith("router"):
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), group=group)
        losses.append(float(loss) / world)
    layer.buffer.close()
    return losses


@pytest.mark.parametrize("with_recompute", [False, True])
def test_the_layer_trains_as_it_does_without_fp8(ranks: Pools, with_recompute: bool) -> None:
    plain = ranks.run(_trained, 2, {"recipe": "none"}, with_recompute)[0]
    assert plain[-1] < 0.7 * plain[0]
    for fp8 in ({}, {"recipe": "current"}, {"recipe": "delayed"}, {"dispatch": False}, {"grad_dispatch": True}):
        losses = ranks.run(_trained, 2, fp8, with_recompute)[0]
        assert losses[-1] == pytest.approx(plain[-1], abs=2e-2 * plain[0]), (fp8, losses[-1], plain[-1])


def _idle(group: dist.ProcessGroup) -> None:
    """All tokens to the experts of rank 0; rank 1 has no tokens of its own."""
    rank = dist.get_rank(group)
    layer = make_layer(group, torch.bfloat16)
    x = torch.randn(0 if rank == 1 else 9, HIDDEN).bfloat16().requires_grad_()
    idx = torch.zeros(len(x), TOPK, dtype=torch.int64)
    out = moe_ep.dispatch_fp8(layer.buffer, x, idx, torch.ones(idx.shape), num_experts=EXPERTS)
    rows = layer.experts(out.rows, out.tokens_per_expert)
    y = moe_ep.combine(layer.buffer, rows, out.handle, out.topk_weights)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    for parameter in layer.experts.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any()) == (rank == 0)
    layer.buffer.close()


def test_a_rank_without_tokens_and_rows_takes_part(ranks: Pools) -> None:
    ranks.run(_idle, 2)


def _autocast(group: dist.ProcessGroup) -> None:
    layer = make_layer(group, torch.float32)
    x = torch.randn(8, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert y.dtype == torch.float32
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())  # type: ignore[union-attr]
    layer.buffer.close()


def test_float32_weights_train_under_autocast(ranks: Pools) -> None:
    ranks.run(_autocast, 1)


def _disagreeing(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    x, idx = torch.randn(4, HIDDEN).bfloat16(), torch.zeros(4, 1, dtype=torch.int64)
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        way = moe_ep.dispatch if rank else moe_ep.dispatch_fp8
        with pytest.raises(moe_ep.ConfigError, match="dtype"):
            way(buffer, x, idx, num_experts=2, alignment=16)
        with pytest.raises((ValueError, RuntimeError), match="float64"):
            moe_ep.dispatch_fp8(buffer, x.double() if rank else x, idx, num_experts=2)


def test_ranks_that_disagree_about_fp8_are_told(ranks: Pools) -> None:
    ranks.run(_disagreeing, 2)
