"""Weights in FP8, cast once for as long as they hold the same values.

Many micro-batches use the same weights, so a cast is kept until they change. What changes them is not always to be
seen: writing through `.data` moves no version counter, and FSDP gathers them anew into recycled memory. So a few rows
of every expert are added up as integers, on the device, before the dispatch; the dispatch waits for its counts on
the host anyway, and behind it the sums are there without another wait. Any step of an optimizer changes some bit of
every row. What this cannot see, a write through `.data` to other rows only, `Fp8Experts.forget_weights` tells it.

Letters: L experts, O and I outputs and inputs of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe_ep.fp8.blocks import Fp8Cast

_SAMPLED_ROWS: Final = 32  # of each expert
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """What two states of a weight are told apart by.

    Attributes:
        identity: address, version, shape and dtype.
        sums: [L, rows] int64 on the host, there once `ready` has passed.
        ready: the end of the copy to the host; None on the CPU.
    """

    identity: tuple[object, ...]
    sums: Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, weight_LOI: Tensor) -> Fingerprint:
        """Starts the sums; they follow on the current stream."""
        weight = weight_LOI.detach()
        identity = identity_of(weight_LOI)
        step = max(1, weight.shape[1] // _SAMPLED_ROWS)
        bits = weight[:, ::step].view(_INTEGERS[weight.element_size()])
        sums = bits.sum(dim=2, dtype=torch.int64)
        if not weight.is_cuda:
            return cls(identity, sums, None)
        on_host = torch.empty(sums.shape, dtype=sums.dtype, device="cpu", pin_memory=True)
        on_host.copy_(sums, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return cls(identity, on_host, ready)

    def matches(self, other: Fingerprint) -> bool:
        """Whether both are of the same values."""
        if self.identity != other.identity:
            return False
        for fingerprint in (self, other):
            if fingerprint.ready is not None:
                fingerprint.ready.synchronize()
        return torch.equal(self.sums, other.sums)


def identity_of(weight: Tensor) -> tuple[object, ...]:
    """What the host sees of a state of a weight without a wait. Made in inference mode, it has no version."""
    return (weight.data_ptr(), None if weight.is_inference() else weight._version, weight.shape, weight.dtype)


class CastWeights:
    """The casts of one layer, by parameter name. A copied or pickled layer begins without."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Fingerprint, Fp8Cast]] = {}

    def get(self, name: str, now: Fingerprint | None, columns: bool, cast: Callable[[], Fp8Cast]) -> Fp8Cast:
        """The cast of the values that `now` was taken of, made by `cast` if it is not kept; None keeps nothing.

        With `columns`, what a forward without gradients left, which has only rows, does not do.
        """
        if now is None:
            return cast()
        kept = self._kept.get(name)
        lacks_columns = columns and kept is not None and len(kept[1].columns) < len(kept[1].rows)
        if kept is None or lacks_columns or not kept[0].matches(now):
            self._kept.pop(name, None)  # before the new one takes memory
            kept = self._kept[name] = (now, cast())
        return kept[1]

    def forget(self) -> None:
        """Drops every cast."""
        self._kept.clear()

    def __deepcopy__(self, memo: dict[int, object]) -> CastWeights:
        return CastWeights()

    def __reduce__(self) -> tuple[type[CastWeights], tuple[()]]:
        return CastWeights, ()
