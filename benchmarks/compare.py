"""Before anything is timed: the systems must hand out the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.processes import World
from benchmarks.timing import Call

# Of sums, which may round at another place in another system; moved rows are equal bit for bit.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


def wrong_calls(world: World, case: str, calls: Sequence[tuple[str, Call]]) -> set[int]:
    """Places of the (dtype, call) that give other rows, on any rank, than the first one of their dtype. Collective."""
    first: dict[str, list[Tensor]] = {}
    wrong = [0.0] * len(calls)
    for place, (dtype, call) in enumerate(calls):
        made = _tensors(call())
        tolerance = TOLERANCES[dtype] if "combine" in case else 0.0
        wrong[place] = float(not same_rows(first.setdefault(dtype, made), made, tolerance))
    return {place for place, said in enumerate(world.slowest(wrong)) if said} if calls else set()


def _tensors(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part.detach().clone() for part in parts]


def same_rows(expected: list[Tensor], made: list[Tensor], tolerance: float) -> bool:
    """Shapes, dtypes and values; bits where `tolerance` is 0."""
    if [(one.shape, one.dtype) for one in expected] != [(one.shape, one.dtype) for one in made]:
        return False
    for one, other in zip(expected, made, strict=True):
        if tolerance == 0.0:
            same = torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        else:
            same = torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance)
        if not same:
            return False
    return True
