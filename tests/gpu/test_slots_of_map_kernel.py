"""The kernels that list the experts of a token beside PyTorch's operations, bit for bit, and the bounds they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ep import _native
from moe_ep.layers import kernels
from moe_ep.layers.slots_of_map import slots_of_map
from tests.helpers.compare import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and PyTorch finds none"),
    pytest.mark.skipif(_native.load() is None, reason="needs moe_ep._C, which this install was made without"),
]
SIZES = [(1, 1, 1), (5, 4, 3), (300, 8, 2), (257, 33, 8), (64, 37, 37), (4096, 128, 8), (1000, 256, 64), (33, 1024, 8)]


def drawn_map(num_tokens: int, num_experts: int, num_slots: int) -> Tensor:
    """[T, E] bool; a token has any number of experts up to K, some none."""
    source = torch.Generator().manual_seed(num_tokens)
    order = torch.rand(num_tokens, num_experts, generator=source).argsort(dim=1)
    counts = torch.randint(0, num_slots + 1, (num_tokens, 1), generator=source)
    return torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(
        1, order, torch.arange(num_experts).expand(num_tokens, -1) < counts
    )


@pytest.mark.parametrize(("num_tokens", "num_experts", "num_slots"), [*SIZES, (0, 8, 2)])
def test_ids_probabilities_and_gradients_are_those_of_the_plain_operations(
    num_tokens: int, num_experts: int, num_slots: int
) -> None:
    chosen = drawn_map(num_tokens, num_experts, num_slots)
    probs = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(1)).requires_grad_()
    ours = probs.detach().cuda().requires_grad_()
    assert kernels.serve(ours, torch.float32)
    expected_idx, expected = slots_of_map(chosen, probs, num_slots)
    idx, weights = slots_of_map(chosen.cuda(), ours, num_slots)
    assert idx.dtype == torch.int64
    assert_same_bits(idx, expected_idx, "ids")
    assert_same_bits(weights.detach(), expected.detach(), "probabilities")
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(grad)
    weights.backward(grad.cuda())
    assert ours.grad is not None
    assert probs.grad is not None
    assert_same_bits(ours.grad, probs.grad, "gradient")


def test_of_too_many_experts_the_first_are_taken_as_everywhere() -> None:
    chosen = torch.ones(3, 70, dtype=torch.bool)
    idx, _ = slots_of_map(chosen.cuda(), torch.rand(3, 70, device="cuda"), 5)
    assert idx.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_strided_inputs_and_expanded_gradients_are_read_right() -> None:
    chosen, probs = drawn_map(40, 16, 4), torch.rand(40, 16, generator=torch.Generator().manual_seed(3))
    expected_idx, expected = slots_of_map(chosen, probs, 4)
    strided = probs.t().contiguous().cuda().t().requires_grad_()
    idx, weights = slots_of_map(chosen.t().contiguous().cuda().t(), strided, 4)
    assert_same_bits(idx, expected_idx, "ids")
    assert_same_bits(weights.detach(), expected, "probabilities")
    weights.sum().backward()
    assert strided.grad is not None
    assert_same_bits(strided.grad, chosen.float(), "gradient")


@pytest.mark.parametrize("sizes", [(-1, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_sizes_that_cannot_be_are_refused_with_their_numbers(sizes: tuple[int, int, int]) -> None:
    names = dict(zip(("num_tokens", "num_experts", "num_slots"), sizes, strict=True))
    with pytest.raises(RuntimeError, match=f"num_tokens is {sizes[0]}, num_experts {sizes[1]}, num_slots {sizes[2]}"):
        _native.require().slots_of_map(map=0, probs=0, idx=0, weights=0, num_sms=0, stream=0, **names)
