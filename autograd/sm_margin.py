"""Tells PyTorch's GEMMs how many SMs an exchange takes while both run.

A persistent GEMM starts as many blocks as it believes there are SMs. Beside an exchange some of them find no place and
run after the others, so the GEMM takes up to twice as long. PyTorch has one setting a process for it (2.7 and newer).
Its grouped GEMM starts fewer blocks then; the GEMM behind `torch.nn.functional.linear` does not look at it.

A GEMM that leaves a part of the SMs goes without it to its end, also when the exchange has ended before. So large
budgets are not announced: beside 64 of 132 SMs a GEMM would take twice as long, as it does when its blocks come in two
waves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

_SET: Final[Any] = getattr(torch._C, "_set_sm_carveout_experimental", None)
_GET: Final[Any] = getattr(torch._C, "_get_sm_carveout_experimental", None)


class SmMargin:
    """`num_sms` of the device are left to others, from construction until `end`.

    Does nothing for more than a quarter of the SMs, where this PyTorch has no such setting, or where somebody else has
    set it to another value. (The same value is taken for what a backward that failed has left behind.)
    """

    def __init__(self, num_sms: int, device: torch.device) -> None:
        self._is_set = _SET is not None and 4 * num_sms <= _count_sms(device) and _GET() in (None, num_sms)
        if self._is_set:
            _SET(num_sms)

    def end(self) -> None:
        """The GEMMs have the whole GPU again; a second call does nothing."""
        if self._is_set:
            self._is_set = False
            _SET(None)


@contextmanager
def sm_margin(num_sms: int, device: torch.device) -> Iterator[None]:
    """GEMMs of the block leave `num_sms` SMs to others."""
    margin = SmMargin(num_sms, device)
    try:
        yield
    finally:
        margin.end()


def is_set() -> bool:
    """Whether GEMMs leave SMs to others just now."""
    return _GET is not None and _GET() is not None


def _count_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
