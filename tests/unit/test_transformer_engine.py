"""The one file that knows the releases of Transformer Engine, against stand-ins with their names and signatures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import moe_ep
from moe_ep.config import FP8Config
from moe_ep.fp8 import quantize_1x128
from moe_ep.fp8.blocks import cast_rows, cast_weights
from moe_ep.fp8.matrix import RowRanges
from moe_ep.integrations import transformer_engine
from moe_ep.layers.fp8.gemm import PlainGemm, TransformerEngineGemm, make_gemm
from moe_ep.layers.fp8.recipe import PerTensor
from tests.helpers.compare import assert_same_bits
from tests.helpers.fake_transformer_engine import RELEASES, QuantizedTensor, install

CPU = torch.device("cpu")
SIZES = (16, 144)


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    install(monkeypatch, request.param)
    return str(request.param)


def _rows(width: int = 192) -> Tensor:
    return torch.randn(sum(SIZES), width, generator=torch.Generator().manual_seed(3))


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize("recipe", ["blockwise", "current"])
def test_every_release_multiplies_what_the_plain_products_do(recipe: str) -> None:
    x, weight = _rows(), torch.randn(2, 320, 192, generator=torch.Generator().manual_seed(4))
    ranges = RowRanges(SIZES, CPU)
    if recipe == "blockwise":
        rows, weights = cast_rows(x, ranges, True).rows, cast_weights(weight, True, columns=False).rows
    else:
        per_tensor = PerTensor(delayed=False, power_of_two=False)
        rows = per_tensor.cast("grad", x, ranges, rows=True, columns=False).rows  # e5m2 beside e4m3
        weights = per_tensor.weights("first", weight, columns=False).rows
    results = []
    for gemm in (PlainGemm(), TransformerEngineGemm()):
        outs = [torch.full((size, 320), float("nan")) for size in SIZES]
        gemm(weights, rows, outs)
        results.append(outs)
    for plain, engine in zip(*results, strict=True):
        torch.testing.assert_close(engine, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("release")
def test_rows_come_out_as_one_tensor_an_expert_over_the_same_memory() -> None:
    codes, scales = quantize_1x128(torch.randn(40, 256, generator=torch.Generator().manual_seed(1)).bfloat16())
    idx = torch.tensor([[0], [2]]).repeat(20, 1)
    with moe_ep.Buffer() as buffer:
        x = QuantizedTensor((40, 256), torch.bfloat16, **_block_attributes(codes, scales))
        assert transformer_engine.is_quantized(x)
        out = moe_ep.dispatch_fp8(buffer, x, idx, num_experts=3)
        tensors = transformer_engine.tensors_per_expert(out.rows)
    assert [tuple(tensor.shape) for tensor in tensors] == [(32, 256), (0, 256), (32, 256)]
    for first, tensor, at in ((0, tensors[0], 0), (1, tensors[2], 32)):
        data, back = transformer_engine.payload_of(tensor)
        assert data.data_ptr() == out.rows.data[at:].data_ptr()
        assert_same_bits(data[:20].view(torch.uint8), codes[first::2].view(torch.uint8), "bytes")
        assert_same_bits(back[:20].contiguous(), scales[first::2].contiguous(), "scales")
        assert bool((back[20:] == 1).all())


def _block_attributes(codes: Tensor, scales_TB: Tensor) -> dict[str, object]:
    """As the library lays them out: transposed, rows padded to 4."""
    padded = torch.full((scales_TB.shape[1], -(-scales_TB.shape[0] // 4) * 4), float("nan"))
    padded[:, : scales_TB.shape[0]] = scales_TB.t()
    kind = transformer_engine.require()._extension.DType.kFloat8E4M3
    data = codes.view(torch.uint8)
    return {"rowwise_data": data, "rowwise_scale_inv": padded, "fp8_dtype": kind, "is_2D_scaled": False}


def test_a_quantised_input_of_dispatch_travels_as_it_is_and_comes_out_dequantised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # cases F04, F05, F08: every number of rows, 17 blocks, gradient straight through
    install(monkeypatch, RELEASES[-1])
    for num_rows in (1, 3, 5):
        powers = 2.0 ** (torch.arange(num_rows).unsqueeze(1) + torch.arange(17) / 2).floor()
        codes, scales = quantize_1x128((448 * powers).repeat_interleave(128, dim=1))
        x = QuantizedTensor((num_rows, 2176), torch.bfloat16, **_block_attributes(codes, scales)).requires_grad_()
        with moe_ep.Buffer() as buffer:
            idx = torch.zeros(num_rows, 1, dtype=torch.int64)
            out = moe_ep.dispatch(buffer, x, idx, num_experts=1)
            expected = (448 * powers).repeat_interleave(128, dim=1).bfloat16()
            assert_same_bits(out.x.detach(), expected, "rows")
            moe_ep.combine(buffer, out.x, out.handle).backward(torch.full((num_rows, 2176), 1 / 3).bfloat16())
        assert_same_bits(x.grad, torch.full((num_rows, 2176), 1 / 3).bfloat16(), "dx")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="layout 'compact'.*x.dequantize"), moe_ep.Buffer() as buffer:
            moe_ep.dispatch(buffer, x, idx, num_experts=1, layout="compact")


def test_a_tensor_with_one_scale_travels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, RELEASES[-1])
    engine = transformer_engine.require()
    data = torch.randn(6, 64).to(torch.float8_e4m3fn)
    shared = {"data": data.view(torch.uint8), "fp8_scale_inv": torch.tensor([0.5])}
    x = QuantizedTensor((6, 64), torch.bfloat16, fp8_dtype=engine._extension.DType.kFloat8E4M3, **shared)
    with moe_ep.Buffer() as buffer:
        out = moe_ep.dispatch_fp8(buffer, x, torch.zeros(6, 1, dtype=torch.int64), num_experts=1)
    assert_same_bits(out.rows.values(torch.float32)[:6], data.float() * 0.5, "rows")
    (tensor,) = transformer_engine.tensors_per_expert(out.rows)
    assert transformer_engine.payload_of(tensor)[1].tolist() == [0.5]


def test_what_cannot_travel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, RELEASES[-1])
    codes, scales = quantize_1x128(torch.randn(8, 256))
    wrong = {
        "tiles": {"is_2D_scaled": True},
        "column-wise only": {"rowwise_data": None},
        "e5m2": {"fp8_dtype": transformer_engine.require()._extension.DType.kFloat8E5M2},
    }
    for change in wrong.values():
        x = QuantizedTensor((8, 256), torch.bfloat16, **{**_block_attributes(codes, scales), **change})
        with pytest.raises(ValueError, match="QuantizedTensor of shape.*row-wise e4m3 data"), moe_ep.Buffer() as buffer:
            moe_ep.dispatch_fp8(buffer, x, torch.zeros(8, 1, dtype=torch.int64), num_experts=1)


@pytest.mark.parametrize("missing", [("_is_2D_scaled",), ("_is_2D_scaled", "_fp8_dtype")], ids=["MXFP8", "NVFP4"])
def test_blocks_of_another_shape_are_named(missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, RELEASES[-1])
    codes, scales = quantize_1x128(torch.randn(8, 256))
    x = QuantizedTensor((8, 256), torch.bfloat16, **_block_attributes(codes, scales))
    for name in missing:
        delattr(x, name)
    with pytest.raises(ValueError, match="QuantizedTensor of shape.*in 1x128 blocks"), moe_ep.Buffer() as buffer:
        moe_ep.dispatch_fp8(buffer, x, torch.zeros(8, 1, dtype=torch.int64), num_experts=1)


# -- what a machine cannot run ----------------------------------------------------------------------------------------


def _capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


@pytest.mark.parametrize(  # case C05
    ("recipe", "capability", "sentence"),
    [
        ("mxfp8", (9, 0), "recipe is 'mxfp8', but it needs a GPU of compute capability 10.0 .* capability 9.0"),
        ("mxfp8", None, "needs a GPU of compute capability 10.0 or newer, and this machine has no CUDA GPU"),
        ("mxfp8", (10, 0), "not to the 1x32 blocks of mxfp8. Or set moe.fp8.recipe to blockwise"),
        ("blockwise", (8, 9), "needs a GPU of compute capability 9.0 or.*set moe.fp8.gemm to plain.*recipe to none"),
        ("current", (8, 0), "needs a GPU of compute capability 8.9"),
    ],
)  # fmt: skip
def test_a_recipe_that_the_gpu_cannot_run_is_refused_with_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, recipe: str, capability: tuple[int, int] | None, sentence: str
) -> None:
    install(monkeypatch, RELEASES[-1])
    _capability(monkeypatch, capability)
    with pytest.raises(moe_ep.ConfigError, match=sentence):
        make_gemm(FP8Config.model_validate({"recipe": recipe}))


@pytest.mark.parametrize(
    ("capability", "sentence"),
    [
        (
            None,
            "gemm cublas needs a GPU of compute capability 9.0, and this machine has no CUDA GPU. Or set moe.fp8.gemm",
        ),
        ((10, 0), "gemm cublas needs a GPU of compute capability 9.0, and this machine has compute capability 10.0"),
    ],
)
def test_products_without_the_library_are_refused_where_they_do_not_run(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, sentence: str
) -> None:
    _capability(monkeypatch, capability)
    with pytest.raises(moe_ep.ConfigError, match=sentence):
        make_gemm(FP8Config(recipe="blockwise", gemm="cublas"))


def test_a_missing_or_unknown_release_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    _capability(monkeypatch, (9, 0))
    config = FP8Config(recipe="blockwise")
    monkeypatch.setattr(transformer_engine, "load", lambda: ImportError("ModuleNotFoundError: no such module"))
    with pytest.raises(
        moe_ep.ConfigError, match=r"does not load here \(ModuleNotFoundError: no such.*engine\[pytorch\]"
    ):
        make_gemm(config)
    install(monkeypatch, "2.2.0")
    with pytest.raises(moe_ep.ConfigError, match=r"2.2 is installed, and 2.3 and later releases of 2 are served"):
        make_gemm(config)
    install(monkeypatch, "2.20.2")
    assert make_gemm(config).name == "te"
    assert make_gemm(FP8Config(recipe="blockwise", gemm="plain")).name == "plain"
