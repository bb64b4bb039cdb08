"""Work beside an exchange: what the caller's stream does while rows travel, forward and backward.

An exchange on CUDA runs on the buffer's own stream. As a rule the caller's stream waits for it at once; here it first
gets its work:

    caller's   router | work ............ | experts      experts' gradient | gradient of work | join | router's
    buffer's          | counts, rows .... |                                | gradients travel |

Forward. The exchange starts behind what the caller's stream held when it was called; the work is put on that stream
before the host waits for counts.
Backward. Of the nodes that are ready, autograd takes the one that forward made last. Forward makes the nodes of `tie`
first, those of the work next, that of the exchange last. So the exchange sets out, the work's gradients are put on the
caller's stream beside it, and the nodes of `tie` make that stream wait. All nodes belong to the caller's stream, as
wrappers that reduce gradients expect.

Memory. What the exchange reads is held until the streams have joined. What it makes lies in the pool of the buffer's
stream: the next to get that memory runs on that stream, behind a later point of the caller's. That needs one caller's
stream, so only the device's default stream has work beside it; on another one, as in a capture, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from moe_ep.autograd import ops
from moe_ep.autograd.sm_margin import SmMargin, sm_margin
from moe_ep.backends.base import Backend, DispatchPlan, DispatchRequest
from moe_ep.buffer import Buffer
from moe_ep.handle import DispatchHandle


class Beside:
    """One dispatch or combine, and the work beside it.

        way = Beside(buffer, work)
        x, weights = way.tie(x, weights)
        out = dispatch(way.buffer, x, idx, weights, ...)

    The work runs in that call; where nothing can run beside (see the module) it does not: `way.buffer` is `buffer`, and
    `tie` changes nothing. Use it for one call.

    Args:
        buffer: the exchange.
        work: what to do; reads only what was there before the call. None for nothing.
    """

    def __init__(self, buffer: Buffer, work: Callable[[], None] | None) -> None:
        self._travel: _Travel | None = None
        self.buffer = buffer
        if work is not None and runs_beside(buffer):
            self._travel = _Travel(buffer.backend, work)
            self.buffer = cast(Buffer, _BufferView(buffer, self._travel))

    def tie(self, tensor: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The inputs whose gradients the exchange brings back, to be given to it; before the call."""
        if self._travel is None or not torch.is_grad_enabled():
            return tensor, weights
        return self._travel.tie(tensor), None if weights is None else self._travel.tie(weights)


def runs_beside(buffer: Buffer) -> bool:
    """Whether work can run beside the next exchange of this buffer."""
    if ops.is_watched() or torch.is_anomaly_enabled():  # the latter looks at gradients before `tie` does
        return False
    stream = buffer.backend.stream
    return stream is not None and _is_default(torch.cuda.current_stream(stream.device))


def _is_default(stream: torch.cuda.Stream) -> bool:
    return bool(stream == torch.cuda.default_stream(stream.device))


class _BufferView:
    """A buffer whose backend is another one."""

    def __init__(self, buffer: Buffer, backend: _Travel) -> None:
        self._buffer, self.backend = buffer, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)


class _Travel:
    """The backend of one call: its exchanges leave the caller's stream free for the work, the rest is passed on."""

    def __init__(self, backend: Backend, work: Callable[[], None]) -> None:
        assert backend.stream is not None
        self._backend, self._stream, self._num_sms = backend, backend.stream, backend.num_sms
        self._work: Callable[[], None] | None = work
        self._grad_enabled = torch.is_grad_enabled()  # for the work, also where an exchange is called without
        self._has_set_out = False  # the exchange of the forward, and has not moved its rows yet
        self._is_tied = False
        self._homeward: _Homeward | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    # -- forward ----------------------------------------------------------------------------------------------------

    def plan_and_dispatch(
        self, request: DispatchRequest, scales: Tensor | None
    ) -> tuple[DispatchPlan, Tensor, Tensor | None]:
        self._set_out()
        with self._moving():
            return self._backend.plan_and_dispatch(request, scales)

    def open_combine(
        self, handle: DispatchHandle, rows: Tensor, weights: Tensor | None, exact: bool, needs_grad: bool
    ) -> bool:
        self._set_out()
        return self._backend.open_combine(handle, rows, weights, exact, needs_grad)

    def combine(
        self,
        handle: DispatchHandle,
        rows: Tensor,
        weights: Tensor | None,
        exact: bool,
        bias: Sequence[Tensor] = (),
    ) -> Tensor:
        with self._moving():
            return self._backend.combine(handle, rows, weights, exact, bias)

    def _set_out(self) -> None:
        """Lets the buffer's stream go on from here, and puts the work on the caller's."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._has_set_out = True
        work, self._work = self._work, None
        if work is not None:
            with sm_margin(self._num_sms, self._stream.device), torch.set_grad_enabled(self._grad_enabled):
                work()

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """The rows of what has set out; a call that begins here (a backward of its own kind) is an ordinary one."""
        if not self._has_set_out:
            yield
            return
        self._has_set_out = False
        with self._on_own_stream():
            yield

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Launches and allocates in the buffer's stream; the caller's waits, behind its work."""
        caller = torch.cuda.current_stream(self._stream.device)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)

    # -- backward ---------------------------------------------------------------------------------------------------

    def tie(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        self._is_tied = True
        tied: Tensor = _Tie.apply(tensor, self)  # type: ignore[no-untyped-call]
        return tied

    def dispatch_backward(
        self, handle: DispatchHandle, grad_rows: Tensor, grad_row_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        with self._going_home(grad_rows, grad_row_weights):
            return self._backend.dispatch_backward(handle, grad_rows, grad_row_weights)

    def combine_backward(
        self, handle: DispatchHandle, grad_y: Tensor, rows: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        with self._going_home(grad_y, rows, weights):
            return self._backend.combine_backward(handle, grad_y, rows, weights)

    @contextmanager
    def _going_home(self, *reads: Tensor | None) -> Iterator[None]:
        """The exchange of a backward: nobody waits for it before `join`."""
        caller = torch.cuda.current_stream(self._stream.device)
        if not self._is_tied or not _is_default(caller):
            yield
            return
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        # Detached: a tensor that knows its graph would hold this very object in a circle.
        held = [tensor.detach() for tensor in reads if tensor is not None]
        self._homeward = _Homeward(self._stream.record_event(), held, SmMargin(self._num_sms, self._stream.device))

    def join(self) -> None:
        """The caller's stream waits for the exchange of the backward; what it read may go."""
        homeward, self._homeward = self._homeward, None
        if homeward is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(homeward.event)
            homeward.margin.end()


@dataclass(frozen=True, eq=False)
class _Homeward:
    """An exchange of a backward: its end, what it reads, and the SMs that it takes from the GEMMs beside it."""

    event: torch.cuda.Event
    reads: list[Tensor]
    margin: SmMargin


class _Tie(torch.autograd.Function):
    """The identity; in backward it waits for the exchange that made the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        ctx.travel.join()
        return grad, None  # no gradient: the travel
