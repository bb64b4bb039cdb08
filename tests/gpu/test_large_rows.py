"""More than 2^31 elements in the rows of one exchange: offsets must not wrap."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import moe_ep
from tests.helpers.ranks import Pools

pytestmark = pytest.mark.gpu
HIDDEN, NUM_TOPK, NUM_TOKENS = 7168, 8, 37450  # 299,600 expert-major rows; the element 2^31 lies in row 299,593
NEEDED_BYTES = 24 * 2**30  # of a rank


def _check(group: dist.ProcessGroup | None, backend: str) -> None:
    """Every token goes to all 8 experts. On two ranks each receives half as many rows of twice as many tokens."""
    value = (torch.arange(NUM_TOKENS, device="cuda") % 251).bfloat16()
    x = value.unsqueeze(1).expand(NUM_TOKENS, HIDDEN).contiguous().requires_grad_()
    idx = torch.arange(NUM_TOPK, device="cuda").expand(NUM_TOKENS, NUM_TOPK)
    weights = torch.ones(NUM_TOKENS, NUM_TOPK, device="cuda")
    with moe_ep.Buffer(group, backend=backend) as buffer:
        out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=NUM_TOPK)
        assert out.x.numel() > 2**31
        assert out.topk_weights is not None
        limit = 2**31 // HIDDEN
        for row in (0, 1, NUM_TOKENS, limit - 1, limit, limit + 1, out.x.shape[0] - 1):
            expected = float(row % NUM_TOKENS % 251)  # every expert gets all tokens of every rank in order
            assert bool((out.x[row] == expected).all()), f"row {row}"
        y = moe_ep.combine(buffer, out.x, out.handle, out.topk_weights)
        y.backward(torch.ones_like(y))
        buffer.check()
        assert x.grad is not None
        near = limit % NUM_TOKENS
        for token in (0, 1, near - 1, near, near + 1, NUM_TOKENS - 2, NUM_TOKENS - 1):
            assert bool((y[token] == 8.0 * (token % 251)).all()), f"y of token {token}"
            assert bool((x.grad[token] == 8.0).all()), f"dx of token {token}"


def _skip_where_memory_is_short(num_ranks: int) -> None:
    needed_bytes = NEEDED_BYTES * -(-num_ranks // torch.cuda.device_count())
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes >> 30} GiB of free GPU memory")


@pytest.mark.parametrize("backend", ["torch", "intranode"])
def test_rows_and_gradients_on_both_sides_of_2_31_elements_are_right(backend: str) -> None:  # case N07
    _skip_where_memory_is_short(1)
    _check(None, backend)
    torch.cuda.empty_cache()


def _check_and_release(group: dist.ProcessGroup) -> None:
    try:
        _check(group, "intranode")
    finally:
        torch.cuda.empty_cache()


def test_two_ranks_exchange_more_than_2_31_elements(ranks: Pools) -> None:  # case N07
    _skip_where_memory_is_short(2)
    ranks.run(_check_and_release, 2)
