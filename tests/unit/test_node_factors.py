"""Weights reach the kernels in the dtype of the sums, which they multiply in."""

from __future__ import annotations

import pytest
import torch

from moe_ep.backends.intranode import _as_factors


@pytest.mark.parametrize(
    ("weights", "rows", "factors"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float64, torch.float64),
    ],
)
def test_factors_have_the_dtype_of_the_sums(weights: torch.dtype, rows: torch.dtype, factors: torch.dtype) -> None:
    given = torch.rand(6, dtype=weights)[::2]
    made = _as_factors(given, rows)
    assert made is not None
    assert (made.dtype, made.is_contiguous()) == (factors, True)
    assert torch.equal(made, given.to(factors))
    assert _as_factors(None, rows) is None
