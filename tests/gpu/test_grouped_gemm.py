"""The experts on CUDA: one grouped GEMM a projection and direction, no host wait; the loop where it does not serve."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.config import MoEConfig, RouterConfig
from moe_ep.layers import grouped_linear
from moe_ep.layers.experts import GroupedExperts
from moe_ep.layers.grouped_linear import linear_per_expert, one_gemm_serves

HAS_GEMM = torch.cuda.is_available() and one_gemm_serves(torch.device("cuda"), torch.bfloat16, (1, 8, 8))
needs_gemm = pytest.mark.skipif(not HAS_GEMM, reason="needs a GPU and a PyTorch with a grouped GEMM without host wait")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and PyTorch finds none"),
]

OFFSETS = {
    "uneven": [0, 3, 250, 251, 300],
    "empty ones": [0, 0, 128, 128, 300],
    "rows behind the last": [0, 2, 130, 130, 203],
    "all rows behind the last": [0, 0, 0, 0, 0],
}
SHAPES = [(8, 8), (24, 40), (256, 512), (2048, 1536)]


@pytest.fixture(autouse=True)
def _dirty_memory() -> None:
    """What the allocator hands out next holds NaN."""
    for size in (2**14, 2**20, 2**23):
        torch.full((size,), math.nan, dtype=torch.bfloat16, device="cuda")


@contextmanager
def no_host_wait() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype).cuda()


def in_double(rows: Tensor, weight: Tensor, offsets: list[int], grad: Tensor) -> list[Tensor]:
    """Product and gradients by a plain loop."""
    out = torch.zeros(rows.shape[0], weight.shape[1], dtype=torch.float64, device="cuda")
    grad_rows, grad_weight = torch.zeros_like(rows, dtype=torch.float64), torch.zeros_like(weight, dtype=torch.float64)
    for expert, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        mine, dy, matrix = rows[begin:end].double(), grad[begin:end].double(), weight[expert].double()
        out[begin:end] = mine @ matrix.t()
        grad_rows[begin:end] = dy @ matrix
        grad_weight[expert] = dy.t() @ mine
    return [out, grad_rows, grad_weight]


@needs_gemm
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
def test_one_gemm_gives_what_a_loop_in_float64_gives(offsets: list[int], num_inputs: int, num_outputs: int) -> None:
    # cases E06, N05: also rows that nobody may read, and experts without rows, whose gradient is exactly 0
    rows, weight = drawn(300, num_inputs), drawn(4, num_outputs, num_inputs, seed=1)
    grad = drawn(300, num_outputs, seed=2)
    rows[offsets[-1] :], grad[offsets[-1] :] = math.nan, math.nan
    leaves = [rows.requires_grad_(), weight.requires_grad_()]
    out = linear_per_expert(*leaves, torch.tensor(offsets, dtype=torch.int32, device="cuda"))
    actual = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    for ours, expected in zip(actual, in_double(rows.detach(), weight.detach(), offsets, grad), strict=True):
        assert ours.isfinite().all()
        scale = float(expected.abs().max())
        torch.testing.assert_close(ours.double(), expected, rtol=2.0**-8, atol=1e-4 * scale)
    for expert, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        assert bool(actual[2][expert].any()) == (end > begin)
    assert not actual[0][offsets[-1] :].any()
    assert not actual[1][offsets[-1] :].any()


def make_experts(hidden: int, ffn: int, dtype: torch.dtype) -> GroupedExperts:
    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=hidden, ffn_hidden_size=ffn, num_experts=4, init_std=0.3, router=RouterConfig(topk=1)
    )
    return GroupedExperts(config, range(4)).to(device="cuda", dtype=dtype)


def results(experts: GroupedExperts, rows: Tensor, *arguments: Any) -> list[Tensor]:
    leaf = rows.detach().requires_grad_()
    y = experts(leaf, *arguments)
    return [y.detach(), *torch.autograd.grad((y * y.detach()).sum(), (leaf, *experts.parameters()))]


@needs_gemm
@pytest.mark.parametrize("counts", [[3, 0, 10, 7], None], ids=["counts", "offsets alone"])
def test_forward_and_backward_wait_for_nothing_and_take_six_gemms(
    counts: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm: Any = grouped_linear._GEMM
    calls = []
    monkeypatch.setattr(grouped_linear, "_GEMM", lambda *args, **kwargs: calls.append(1) or gemm(*args, **kwargs))
    experts, rows = make_experts(64, 32, torch.bfloat16), drawn(20, 64)
    offsets = torch.tensor([0, 3, 3, 13, 20], dtype=torch.int32, device="cuda")
    with no_host_wait():
        results(experts, rows, counts, offsets)
    assert len(calls) == 6  # two projections, each with a product and two gradients
    if counts is not None:
        with no_host_wait():
            results(experts, rows, counts)  # the offsets travel without a wait too


@pytest.mark.parametrize(
    ("hidden", "ffn", "dtype"),
    [(64, 32, torch.bfloat16), (60, 32, torch.bfloat16), (64, 33, torch.bfloat16), (64, 32, torch.float16)]
    + [(64, 32, torch.float32)],
)
@pytest.mark.parametrize("counts", [[3, 0, 10, 7], [0, 0, 0, 0], [0, 130, 0, 0]])
def test_experts_of_any_size_and_dtype_agree_with_float64(
    counts: list[int], hidden: int, ffn: int, dtype: torch.dtype
) -> None:
    # rows of 120 and 66 bytes and other dtypes take the loop
    experts, rows = make_experts(hidden, ffn, dtype), drawn(sum(counts), hidden, dtype=dtype)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    by_counts, by_both = results(experts, rows, counts), results(experts, rows, counts, offsets)
    by_offsets = results(experts, rows, None, offsets)
    expected = results(experts.double(), rows.double(), counts)
    tolerance = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 1e-5}[dtype]
    for ours, both, alone, wanted in zip(by_counts, by_both, by_offsets, expected, strict=True):
        assert torch.equal(ours, both)
        torch.testing.assert_close(ours, alone, rtol=tolerance, atol=tolerance)
        atol = tolerance * float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(ours.double(), wanted, rtol=tolerance, atol=atol)


@needs_gemm
def test_a_pytorch_without_a_grouped_gemm_takes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, rows = make_experts(64, 32, torch.bfloat16), drawn(20, 64)
    by_gemm = results(experts, rows, [3, 0, 10, 7])
    monkeypatch.setattr(grouped_linear, "_GEMM", None)
    assert not one_gemm_serves(torch.device("cuda"), torch.bfloat16, (4, 64, 64))
    for ours, expected in zip(by_gemm, results(experts, rows, [3, 0, 10, 7]), strict=True):
        atol = 0.02 * float(expected.abs().max())
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=atol)


@needs_gemm
def test_autocast_takes_the_gemm_and_gives_back_float32() -> None:
    # case N02
    experts, rows = make_experts(64, 32, torch.float32), drawn(20, 64, dtype=torch.float32)
    expected = results(experts, rows, [3, 0, 10, 7])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        actual = results(experts, rows, [3, 0, 10, 7])
    for ours, wanted in zip(actual, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, wanted, rtol=0.03, atol=0.03 * float(wanted.abs().max()))


@needs_gemm
def test_compiled_experts_give_the_bits_of_the_eager_ones() -> None:
    experts, rows = make_experts(64, 32, torch.bfloat16), drawn(20, 64)
    offsets = torch.tensor([0, 3, 3, 13, 18], dtype=torch.int32, device="cuda")
    expected = results(experts, rows, None, offsets)
    compiled: Any = torch.compile(experts, backend="aot_eager", fullgraph=True)
    leaf = rows.detach().requires_grad_()
    y = compiled(leaf, None, offsets)
    actual = [y.detach(), *torch.autograd.grad((y * y.detach()).sum(), (leaf, *experts.parameters()))]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))
