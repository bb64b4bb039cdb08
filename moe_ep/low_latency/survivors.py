"""How a call of a group that may lose ranks ends: with the same outcome on all that are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from moe_ep.backends.base import Backend
from moe_ep.errors import EPTimeoutError

T = TypeVar("T")


def among_the_living(backend: Backend, exchange: Callable[[], T], call: int, nothing: Tensor) -> T:
    """Runs the exchange of one call; if ranks are lost meanwhile, again among the others.

    A rank may have all its rows while another waits in vain for those of the lost one. So a call ends with an exchange
    that carries nothing: who is past it knows that all have their rows. Those who fail tell each other how far they
    were. Where all were past the rows, the call stands as it is; otherwise all run it again.

    Args:
        call: its number, the same on every rank.
        nothing: [1] zero, for the exchange at the end.

    Raises:
        EPTimeoutError: the others went on without this rank, or were in another call.
    """
    while True:
        stage = 2 * call
        try:
            result = exchange()
            stage += 1  # past the rows
            backend.all_reduce(nothing)
        except EPTimeoutError:
            stages = backend.shrink(stage)
        else:
            return result
        first, last = min(stages.values()), max(stages.values())
        if first % 2 == 0 and last // 2 != first // 2:
            raise EPTimeoutError(
                f"ranks were lost while the others were in different low-latency calls, numbers {first // 2} to "
                f"{last // 2}; call reset() on every rank that is left."
            )
        if stage % 2 and first >= stage:
            return result
