"""What keeps a stream busy, so that calls are in flight for as long as a test needs."""

from __future__ import annotations

import torch

CYCLES_PER_MILLI = 2_000_000  # at 2 GHz; a slower clock makes it longer


def keep_busy(millis: float) -> None:
    """Gives the current stream a kernel of at least `millis` ms, on one SM."""
    torch.cuda._sleep(int(millis * CYCLES_PER_MILLI))
