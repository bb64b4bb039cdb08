"""`EventHandle` and `EventOverlap`: a point in a CUDA stream's work, and the wait for it, under DeepEP V1's names.

On a machine or in a process without CUDA both work and wait for nothing: work on the CPU has ended when its call
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import Tensor


class EventHandle:
    """Marks what a CUDA stream has been given so far, at the moment of construction.

    Where this process has not started CUDA there is no such work, and the handle is empty: it starts no CUDA itself.

    Args:
        stream: None for the current one.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._event = (stream or torch.cuda.current_stream()).record_event() if in_use else None

    def current_stream_wait(self) -> None:
        """Makes the current CUDA stream wait for the mark, without stopping the host; does nothing if empty."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """What an asynchronous call returns: the event of its end, and what must live until then.

    As a context manager it waits at the end of the block, so that the block overlaps with the call::

        x, *_, event = buffer.dispatch(..., async_finish=True)
        with event:
            shared_experts(...)

    Args:
        event: the event to wait for; None stands for a call that had already ended when it returned.
        extra_tensors: tensors to keep alive as long as this object.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: Sequence[Tensor] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hook: Callable[[], object] | None = None
        self._release_at_exit = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait for the event, then runs and forgets the hook, if one is registered.

        Args:
            release_handle: forget the event afterwards; a further wait raises.

        Raises:
            RuntimeError: there is no event.
        """
        if self.event is None:
            raise RuntimeError(
                "this EventOverlap has no event: its call was not asynchronous, or its event was released; wait only "
                "on what a call with async_finish=True or Buffer.capture() returned, and once if release_handle=True."
            )
        self._wait(release_handle)

    def register_hook_after_wait(self, hook: Callable[[], object]) -> None:
        """Registers a function without arguments that the next wait runs once, after waiting; its result is dropped.

        Raises:
            RuntimeError: a hook is registered that has not run yet.
        """
        if self._hook is not None:
            raise RuntimeError(
                f"this EventOverlap already has the hook {self._hook!r}, and it holds one; wait for the event, or "
                "register one function that calls both."
            )
        self._hook = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Sets what the wait at the end of a `with` block does, and returns this object.

        Args:
            release_handle: forget the event after that wait.
        """
        self._release_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits, also when the block raised; without an event there is nothing to wait for, and only the hook runs."""
        self._wait(self._release_at_exit)

    def _wait(self, release_handle: bool) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
        if release_handle:
            self.event = None
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
