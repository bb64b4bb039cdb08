"""The SwiGLU kernels beside the formula in float64: values, gradients, tails, addresses, and as custom ops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_ep import _native
from moe_ep.layers import swiglu
from moe_ep.layers.activations import activate, weighted_activate
from moe_ep.layers.weighted_swiglu import weighted_swiglu_backward_op, weighted_swiglu_op

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and PyTorch finds none"),
    pytest.mark.skipif(_native.load() is None, reason="needs moe_ep._C, which this install was made without"),
]

# A result is within half a unit in the last place of its dtype, and a little more for the arithmetic before.
HALF_UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}
EVERY_DTYPE = pytest.mark.parametrize("dtype", HALF_UNITS.keys(), ids=str)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype).cuda()


def formula(projected: Tensor) -> Tensor:
    gate, up = projected.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def formula_gradient(projected: Tensor, grad_out: Tensor) -> Tensor:
    leaf = projected.double().requires_grad_()
    (gradient,) = torch.autograd.grad(formula(leaf), leaf, grad_out.double())
    return gradient


def assert_rounds_to(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """`expected` in float64; a little absolute error is left for sums that cancel and for numbers below the normal."""
    tolerance = {"rtol": HALF_UNITS[actual.dtype] * 1.02, "atol": scale * 4e-6 + 6e-8, "equal_nan": True}
    torch.testing.assert_close(actual.double(), expected, **tolerance)


def check(projected: Tensor) -> None:
    leaf = projected.detach().requires_grad_()
    out = activate(leaf, "swiglu")
    assert out.dtype == projected.dtype
    assert_rounds_to(out, formula(projected))
    grad_out = drawn(tuple(out.shape), projected.dtype, seed=1)
    (gradient,) = torch.autograd.grad(out, leaf, grad_out)
    assert gradient.shape == projected.shape
    assert_rounds_to(gradient, formula_gradient(projected, grad_out), scale=10.0)


@EVERY_DTYPE
@pytest.mark.parametrize("ffn", [1, 3, 4, 7, 8, 12, 96, 250, 768, 2048])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 300])
def test_values_and_gradients_are_those_of_the_formula(num_rows: int, ffn: int, dtype: torch.dtype) -> None:
    assert swiglu.serves(drawn((1, 2), dtype))
    check(drawn((num_rows, 2 * ffn), dtype, seed=ffn))


@EVERY_DTYPE
@pytest.mark.parametrize("ffn", [16, 17])
def test_extreme_gates_give_what_the_formula_gives(ffn: int, dtype: torch.dtype) -> None:
    gates = [
        0.0,
        -0.0,
        1e-3,
        -1.2784645,
        20.0,
        -20.0,
        88.0,
        -88.0,
        95.0,
        -95.0,
        1e4,
        -1e4,
        math.inf,
        math.nan,
        1.0,
        2.0,
    ]
    gate = torch.tensor([gates + [3.0] * (ffn - 16)]).to(dtype).cuda()
    projected = torch.cat((gate, torch.full_like(gate, 1.5)), dim=1)
    out = activate(projected, "swiglu")
    assert_rounds_to(out, formula(projected))
    leaf = projected.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(activate(leaf, "swiglu"), leaf, torch.ones_like(out))
    expected = formula_gradient(projected, torch.ones_like(out))
    finite = expected.isfinite()
    assert_rounds_to(gradient[finite], expected[finite])


@EVERY_DTYPE
def test_rows_at_any_address_and_stride_are_read_right(dtype: torch.dtype) -> None:
    # cases I06, A04, A05
    flat = drawn((5 * 64 + 1,), dtype)
    shifted = flat[1:].view(5, 64)
    assert shifted.data_ptr() % 16 != 0
    check(shifted)
    check(drawn((9, 256), dtype)[:, ::2])
    check(drawn((64, 10), dtype).t())
    check(drawn((3, 4, 64), dtype))
    leaf = drawn((4, 64), dtype).requires_grad_()
    activate(leaf, "swiglu").sum().backward()
    assert leaf.grad is not None
    assert_rounds_to(leaf.grad, formula_gradient(leaf.detach(), torch.ones(4, 32, device="cuda")), scale=10.0)


@EVERY_DTYPE
@pytest.mark.parametrize("num_real", [0, 3, 17, 20])
def test_rows_behind_the_last_offset_are_zero_and_never_read(num_real: int, dtype: torch.dtype) -> None:
    # cases N05, E06: the rows behind hold NaN
    for ffn in (24, 25):
        projected = drawn((20, 2 * ffn), dtype)
        projected[num_real:] = math.nan
        offsets = torch.tensor([0, 0, num_real], dtype=torch.int32, device="cuda")
        leaf = projected.detach().requires_grad_()
        out = activate(leaf, "swiglu", offsets)
        grad_out = drawn((20, ffn), dtype, seed=1)
        grad_out[num_real:] = math.nan
        (gradient,) = torch.autograd.grad(out, leaf, grad_out)
        assert (out[num_real:] == 0).all()
        assert (gradient[num_real:] == 0).all()
        assert_rounds_to(out[:num_real], formula(projected[:num_real]))
        expected = formula_gradient(projected[:num_real], grad_out[:num_real])
        assert_rounds_to(gradient[:num_real], expected, scale=10.0)


@pytest.mark.parametrize("width", [1, 3, 8, 40])
@pytest.mark.parametrize("num_real", [0, 4, 9])
def test_zero_tail_leaves_the_rows_before_alone(num_real: int, width: int) -> None:
    rows = torch.full((9, width), math.nan, dtype=torch.bfloat16, device="cuda")
    rows[:num_real] = 7.0
    swiglu.zero_tail(rows, torch.tensor([0, 1, num_real], dtype=torch.int32, device="cuda"))
    assert (rows[:num_real] == 7).all()
    assert (rows[num_real:] == 0).all()


def test_rows_past_2_31_elements_are_addressed_right() -> None:
    # case N07
    ffn, num_rows = 4096, 2**31 // 8192 + 3
    needed_bytes = 2 * 3 * num_rows * ffn * 2
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes / 2**30:.0f} GiB of free GPU memory")
    last = drawn((3, 2 * ffn), torch.bfloat16)
    projected = torch.zeros(num_rows, 2 * ffn, dtype=torch.bfloat16, device="cuda")
    projected[-3:] = last
    leaf = projected.requires_grad_()
    out = activate(leaf, "swiglu")
    assert_rounds_to(out[-3:].detach(), formula(last))
    assert not out[:-3].any()
    (gradient,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    assert_rounds_to(gradient[-3:], formula_gradient(last, torch.ones(3, ffn, device="cuda")), scale=10.0)


def test_the_kernel_runs_on_the_current_stream() -> None:
    source = drawn((64, 2048), torch.bfloat16)
    projected = torch.zeros_like(source)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # the copy below comes late: a kernel on another stream would see zeros
        projected.copy_(source)
        out = activate(projected, "swiglu")
    side.synchronize()
    assert_rounds_to(out, formula(source))


def test_a_compiled_activation_gives_the_bits_of_the_eager_one() -> None:
    projected = drawn((33, 128), torch.bfloat16).requires_grad_()
    offsets = torch.tensor([0, 10, 30], dtype=torch.int32, device="cuda")

    def run(call: object) -> tuple[Tensor, Tensor]:
        out = call(projected, "swiglu", offsets)  # type: ignore[operator]
        (gradient,) = torch.autograd.grad(out.float().square().sum(), projected)
        return out, gradient

    expected = run(activate)
    actual = run(torch.compile(activate, backend="aot_eager", fullgraph=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


@pytest.mark.parametrize("has_offsets", [False, True])
def test_the_custom_ops_keep_the_rules_of_pytorch(has_offsets: bool) -> None:
    projected = drawn((6, 32), torch.float32).requires_grad_()
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device="cuda") if has_offsets else None
    torch.library.opcheck(swiglu.swiglu_op, (projected, offsets))
    torch.library.opcheck(swiglu.swiglu_backward_op, (projected.detach(), drawn((6, 16), torch.float32), offsets))


@EVERY_DTYPE
@pytest.mark.parametrize("ffn", [1, 3, 8, 40, 250, 256, 768, 2048])
@pytest.mark.parametrize("num_real", [0, 5, 37])
def test_weights_of_rows_and_their_gradients_are_those_of_the_formula(
    ffn: int, num_real: int, dtype: torch.dtype
) -> None:
    # cases N05, G01: rows behind the last offset hold NaN
    num_rows = 37
    offsets = torch.tensor([0, 0, num_real], dtype=torch.int32, device="cuda")
    projected, grad_out = drawn((num_rows, 2 * ffn), dtype), drawn((num_rows, ffn), dtype, seed=1)
    weights = drawn((num_rows,), torch.float32, seed=2)
    for tensor in (projected, grad_out, weights):
        tensor[num_real:] = math.nan
    leaf, row_weights = projected.requires_grad_(), weights.requires_grad_()
    out = weighted_activate(leaf, row_weights, "swiglu", offsets)
    gradients = torch.autograd.grad(out, (leaf, row_weights), grad_out)
    assert all((tensor[num_real:] == 0).all() for tensor in (out, *gradients))

    real, real_weights = (tensor.detach()[:num_real].double().requires_grad_() for tensor in (projected, weights))
    expected = formula(real) * real_weights[:, None]
    assert_rounds_to(out[:num_real], expected)
    expected_leaf, expected_weights = torch.autograd.grad(expected, (real, real_weights), grad_out[:num_real].double())
    assert_rounds_to(gradients[0][:num_real], expected_leaf, scale=10.0)
    terms = (formula(real) * grad_out[:num_real].double()).abs().sum(1)
    tolerance = 2.0**-20 if dtype == torch.float32 else 2.0**-15  # the fast sigmoid is within 1e-5
    assert ((gradients[1][:num_real] - expected_weights).abs() <= tolerance * terms + 1e-6).all()


def test_the_weighted_custom_ops_keep_the_rules_of_pytorch() -> None:
    rows, weights = drawn((6, 32), torch.float32).requires_grad_(), drawn((6,), torch.float32).requires_grad_()
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device="cuda")
    torch.library.opcheck(weighted_swiglu_op, (rows, weights, offsets))
    grad = drawn((6, 16), torch.float32)
    torch.library.opcheck(weighted_swiglu_backward_op, (rows.detach(), weights.detach(), grad, offsets))


def test_a_second_derivative_is_refused_with_a_sentence() -> None:
    # case A09
    leaf = drawn((3, 16), torch.float32).requires_grad_()
    (gradient,) = torch.autograd.grad(activate(leaf, "swiglu").sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        gradient.sum().backward()


def test_float64_takes_the_formula() -> None:
    leaf = drawn((3, 16), torch.float64).requires_grad_()
    assert not swiglu.serves(leaf)
    torch.autograd.gradcheck(lambda rows: activate(rows, "swiglu"), leaf)
