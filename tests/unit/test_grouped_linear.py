"""The map per expert as one grouped GEMM, on the CPU version of PyTorch's: products, empty experts, tails, layouts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.layers import experts as experts_module
from moe_ep.layers import grouped_linear
from moe_ep.layers.grouped_linear import linear_per_expert, one_gemm_serves

NUM_EXPERTS, NUM_INPUTS, NUM_OUTPUTS = 4, 16, 24
OFFSETS = {
    "uneven": [0, 3, 10, 11, 20],
    "an empty one in the middle": [0, 5, 5, 9, 20],
    "empty ones at both ends": [0, 0, 7, 20, 20],
    "rows behind the last": [0, 2, 3, 3, 13],
    "all rows behind the last": [0, 0, 0, 0, 0],
}


@pytest.fixture
def _one_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    if grouped_linear._GEMM is None:
        pytest.skip("needs a PyTorch with a grouped GEMM")
    for module in (grouped_linear, experts_module):
        monkeypatch.setattr(module, "one_gemm_serves", lambda *_: True)


def step(rows: Tensor, weight: Tensor, offsets: Tensor, grad: Tensor, has_tail: bool = True) -> list[Tensor]:
    leaves = [rows.detach().requires_grad_(), weight.detach().requires_grad_()]
    out = linear_per_expert(*leaves, offsets, has_tail)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.usefixtures("_one_gemm")
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
def test_one_gemm_gives_what_the_loop_gives(offsets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # case E06
    rows, weight, grad = (
        drawn(20, NUM_INPUTS),
        drawn(NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS, seed=1),
        drawn(20, NUM_OUTPUTS),
    )
    rows[offsets[-1] :], grad[offsets[-1] :] = math.nan, math.nan  # nobody may read them
    given = torch.tensor(offsets, dtype=torch.int32)
    actual = step(rows, weight, given, grad)
    monkeypatch.setattr(grouped_linear, "one_gemm_serves", lambda *_: False)
    for ours, theirs in zip(actual, step(rows, weight, given, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("_one_gemm")
def test_rows_at_any_address_and_stride_are_read_right(monkeypatch: pytest.MonkeyPatch) -> None:
    # cases A04, A05, I06
    given = torch.tensor(OFFSETS["uneven"], dtype=torch.int32)
    flat = drawn(20 * NUM_INPUTS + 1)
    views = [flat[1:].view(20, NUM_INPUTS), drawn(20, 2 * NUM_INPUTS)[:, ::2], drawn(NUM_INPUTS, 20).t()]
    weight = drawn(NUM_EXPERTS, NUM_INPUTS, NUM_OUTPUTS, seed=1).transpose(1, 2)
    grad = drawn(1, 1).expand(20, NUM_OUTPUTS)
    for rows in views:
        for ours, packed in zip(
            step(rows, weight, given, grad), step(rows.clone(), weight.contiguous(), given, grad.clone()), strict=True
        ):
            assert torch.equal(ours, packed)


@pytest.mark.usefixtures("_one_gemm")
def test_the_experts_call_one_gemm_a_projection_and_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["offs"])
        gemm: Any = torch.nn.functional.grouped_mm
        out: Tensor = gemm(*args, **kwargs)
        return out

    monkeypatch.setattr(grouped_linear, "_GEMM", counted)
    experts = make_experts().bfloat16()
    rows = drawn(20, NUM_INPUTS).requires_grad_()
    experts(rows, [3, 0, 10, 7]).sum().backward()
    assert len(calls) == 6  # two projections, each with a product and two gradients
    assert all(offsets.tolist() == [3, 3, 13, 20] for offsets in calls)


@pytest.mark.usefixtures("_one_gemm")
@pytest.mark.parametrize("counts", [[3, 0, 10, 7], [0, 0, 0, 0], [0, 20, 0, 0]])
def test_counts_and_offsets_give_the_same_bits_and_every_expert_a_gradient(counts: list[int]) -> None:
    # cases E02, E03
    experts = make_experts().bfloat16()
    rows = drawn(sum(counts), NUM_INPUTS)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    results = []
    for arguments in ((counts, None), (counts, offsets), (None, offsets)):
        leaf = rows.clone().requires_grad_()
        y = experts(leaf, *arguments)
        results.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), (leaf, *experts.parameters()))])
    for others in results[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[0], others, strict=True))
    for gradient in results[0][2:]:
        assert all(bool(gradient[e].any()) == (counts[e] > 0) for e in range(NUM_EXPERTS))


def test_the_grouped_gemm_serves_bfloat16_on_cuda_in_rows_of_16_bytes() -> None:
    shape = (NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS)
    cuda = torch.device("cuda")
    assert not one_gemm_serves(torch.device("cpu"), torch.bfloat16, shape)
    assert not one_gemm_serves(cuda, torch.float16, shape)
    assert not one_gemm_serves(cuda, torch.bfloat16, (NUM_EXPERTS, NUM_OUTPUTS, 12))
    assert not one_gemm_serves(cuda, torch.bfloat16, (NUM_EXPERTS, 12, NUM_INPUTS))
    assert not one_gemm_serves(cuda, torch.bfloat16, (0, NUM_OUTPUTS, NUM_INPUTS))
    assert not one_gemm_serves(cuda, torch.bfloat16, (1024, NUM_OUTPUTS, NUM_INPUTS))


def make_experts() -> experts_module.GroupedExperts:
    from tests.unit.router_helpers import make_config

    config = make_config(NUM_EXPERTS, hidden_size=NUM_INPUTS, topk=1).model_copy(update={"ffn_hidden_size": 8})
    return experts_module.GroupedExperts(config, range(NUM_EXPERTS))
