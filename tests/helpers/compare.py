"""Comparisons that say where two tensors part."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Same shape, dtype and bytes; names the first place that differs and both values."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if actual.numel() == 0:
        return
    ours, theirs = (t.detach().cpu().contiguous().reshape(-1) for t in (actual, expected))
    size = ours.element_size()
    differs = (ours.view(torch.uint8).view(-1, size) != theirs.view(torch.uint8).view(-1, size)).any(dim=1)
    if bool(differs.any()):
        first = int(differs.nonzero()[0])
        place = [int(i) for i in torch.unravel_index(torch.tensor(first), actual.shape)]
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {ours.numel()} values differ, first at {place}: "
            f"{ours[first].item()!r}, expected {theirs[first].item()!r}"
        )


def assert_close(actual: Tensor, expected: Tensor, rtol: float, what: str) -> None:
    """Largest error at most `rtol` of the largest expected value."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    if actual.numel() == 0:
        return
    ours, theirs = actual.detach().double().cpu(), expected.detach().double().cpu()
    error, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
    assert error <= rtol * max(scale, 1e-30), (
        f"{what}: error {error:.3g} of a largest value {scale:.3g} (rtol {rtol:g})"
    )
