"""Transformer Engine's FP8 products under our experts, and its tensors at both ends of a dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep.config import FP8Config
from moe_ep.fp8.blocks import cast_rows, cast_weights
from moe_ep.fp8.matrix import RowRanges
from moe_ep.integrations import transformer_engine
from moe_ep.layers.fp8.cublas import CublasGemm
from moe_ep.layers.fp8.gemm import GroupedGemm, PlainGemm, TransformerEngineGemm, make_gemm
from moe_ep.layers.fp8.recipe import PerTensor
from tests.distributed.test_fp8_experts import NAMES, TOKENS, functional, gathered, oracle
from tests.helpers.compare import assert_same_bits
from tests.helpers.fp8_oracle import relative_error
from tests.helpers.ranks import Pools
from tests.unit.test_fp8_row_weights import check_weighed, one_at_a_time, weighed

OBSTACLE = transformer_engine.why_unavailable("blockwise")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"FP8 products do not run here: {OBSTACLE}"),
]

GPU = torch.device("cuda")
SIZES = (16, 144, 32, 1024)


@pytest.mark.parametrize("tested", [TransformerEngineGemm(), CublasGemm()], ids=["te", "cublas"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["blockwise", "current"])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 512), (192, 96), (4096, 7168)])
def test_the_three_products_are_those_of_the_dequantised_matrices(
    outputs: int, inputs: int, recipe: str, out_dtype: torch.dtype, tested: GroupedGemm
) -> None:
    ranges = RowRanges(SIZES, GPU)
    g = torch.Generator(device=GPU).manual_seed(1)
    x = torch.randn(sum(SIZES), inputs, generator=g, device=GPU).bfloat16()
    grad = torch.randn(sum(SIZES), outputs, generator=g, device=GPU).bfloat16()
    weight = torch.randn(len(SIZES), outputs, inputs, generator=g, device=GPU).bfloat16()
    if recipe == "blockwise":
        rows, grads = (cast_rows(part, ranges, True, rows=True, columns=True) for part in (x, grad))
        made = cast_weights(weight, True, columns=True)
    else:
        cast = PerTensor(delayed=False, power_of_two=False)
        rows, grads = (
            cast.cast(name, part, ranges, rows=True, columns=True) for name, part in (("x", x), ("grad", grad))
        )
        made = cast.weights("w", weight, columns=True)
    weights, back = made.rows, made.columns
    products = {"fprop": (weights, rows.rows), "dgrad": (back, grads.rows), "wgrad": (rows.columns, grads.columns)}
    for name, (a, b) in products.items():
        results = []
        for gemm in (tested, PlainGemm()):
            outs = [
                torch.empty(len(y.data), len(w.data), dtype=out_dtype, device=GPU) for w, y in zip(a, b, strict=True)
            ]
            gemm(a, b, outs)
            results.append(outs)
        for expert, (ours, expected) in enumerate(zip(*results, strict=True)):
            error = relative_error(ours, expected.cpu())
            assert error <= 5e-3, (name, expert, error)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_values_are_those_of_the_quantised_inputs_and_gradients_close_to_them(
    ranks: Pools, world: int, power_of_two: bool
) -> None:
    by_rank = ranks.run(functional, world, torch.bfloat16, {"gemm": "te", "power_of_two_scales": power_of_two}, "cuda")
    found, expected = gathered(by_rank), oracle(torch.bfloat16, power_of_two)
    errors = {name: relative_error(found[name], expected[name]) for name in NAMES}
    assert errors["y"] <= 2e-2, errors
    assert max(errors.values()) <= 5e-2, errors
    assert len(found["y"]) == TOKENS
    assert not bool(found["y"][2:4].any())  # sent nowhere; a row of zeros
    assert not bool(found["gate_up"][4].any())  # an expert without rows
    assert not bool(found["down"][4].any())


@pytest.mark.parametrize("gemm", ["te", "cublas"])
@pytest.mark.parametrize(
    "fp8",
    [{}, {"recipe": "current"}, {"recipe": "delayed"}, {"wgrad": "bf16"}, {"recipe": "current", "wgrad": "bf16"}],
)
def test_every_setting_is_near_the_same_on_plain_products(ranks: Pools, fp8: dict[str, Any], gemm: str) -> None:
    ours = gathered(ranks.run(functional, 2, torch.bfloat16, {"gemm": gemm, **fp8}, "cuda"))
    plain = gathered(ranks.run(functional, 2, torch.bfloat16, {"gemm": "plain", **fp8}, "cuda"))
    errors = {name: relative_error(ours[name], plain[name]) for name in NAMES}
    assert max(errors.values()) <= 3e-2, errors


@pytest.mark.parametrize("gemm", ["te", "cublas", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_rows_count_times_their_weight_whatever_it_is(wgrad: str, dtype: torch.dtype, gemm: str) -> None:
    """0, negative and huge weights; 144 rows of an expert, and none. Case F01, F02."""
    found = weighed(dtype, "cuda", 2.0**40, gemm=gemm, wgrad=wgrad)
    check_weighed(found, dtype, 2.0**40, forward=2e-2, backward=5e-2)


@pytest.mark.parametrize("gemm", ["te", "cublas"])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_recipes_with_one_scale_weigh_too(recipe: str, gemm: str) -> None:
    found = weighed(torch.bfloat16, "cuda", 2.0, recipe=recipe, gemm=gemm)
    check_weighed(found, torch.bfloat16, 2.0, forward=1e-1, backward=1.2e-1)


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_every_gradient_comes_alone_too(wgrad: str) -> None:
    """Also where nothing is cast on the way: the weights' gradient is then a kernel of its own."""
    whole = weighed(torch.bfloat16, "cuda", 2.0, gemm="cublas", wgrad=wgrad)
    for name, alone in one_at_a_time(torch.bfloat16, "cuda", 2.0, gemm="cublas", wgrad=wgrad).items():
        assert relative_error(alone, whole[name]) <= 5e-3, name


def test_their_tensors_go_in_and_come_out(ranks: Pools) -> None:
    ranks.run(_tensors, 2)


def _tensors(group: dist.ProcessGroup) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    engine = transformer_engine.require()
    quantizer = engine._block_quantizer(
        engine._kinds[torch.float8_e4m3fn], rowwise=True, columnwise=False, force_pow_2_scales=True, block_scaling_dim=1
    )
    g = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randn(37, 512, generator=g, device="cuda", dtype=torch.bfloat16)
    quantized = quantizer(x)
    idx = torch.randint(0, 4, (37, 1), generator=g, device="cuda")
    with moe_ep.Buffer(group, timeout_secs=20, backend="intranode" if world > 1 else "auto") as buffer:
        out = moe_ep.dispatch_fp8(buffer, quantized, idx, num_experts=4)
        tensors = transformer_engine.tensors_per_expert(out.rows)
        kind = type(quantized)
        assert all(isinstance(tensor, kind) for tensor in tensors)
        values = torch.cat([tensor.dequantize() for tensor in tensors])
        assert_same_bits(values.bfloat16(), out.rows.values(torch.bfloat16), "their view of our rows")
        home = moe_ep.combine(buffer, values.bfloat16(), out.handle)
        assert_same_bits(home, quantized.dequantize().bfloat16(), "there and back")
        again = moe_ep.dispatch(buffer, quantized, idx, num_experts=4, alignment=16)
        assert_same_bits(again.x, out.rows.values(torch.bfloat16), "dequantised rows")


def test_experts_without_rows_get_a_zero_gradient_and_groups_of_any_size_are_multiplied() -> None:
    for sizes in ((0, 16, 0), (16,), (0, 0), (16, 32, 48, 64, 80, 0, 96)):
        ranges = RowRanges(sizes, GPU)
        x, y = (torch.randn(sum(sizes), 256, device=GPU).bfloat16() for _ in range(2))
        a, b = (cast_rows(part, ranges, True, rows=False, columns=True).columns for part in (x, y))
        outs = torch.full((2, len(sizes), 256, 256), float("nan"), device=GPU)
        for gemm, out in zip((CublasGemm(), PlainGemm()), outs, strict=True):
            gemm(a, b, out.unbind())
        for size, ours, expected in zip(sizes, *outs, strict=True):
            assert bool(ours.any()) == (size > 0)
            assert relative_error(ours, expected.cpu()) <= 5e-3 if size else not bool(ours.isnan().any())


def test_the_newest_release_is_the_one_that_was_tested() -> None:
    assert make_gemm(FP8Config(recipe="blockwise")).name == "te"
    assert transformer_engine.require().version <= transformer_engine.NEWEST
