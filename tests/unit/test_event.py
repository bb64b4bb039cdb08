"""`EventHandle` and `EventOverlap`: empty on the CPU, in order on CUDA streams, one hook, one release."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

import moe_ep.utils
from moe_ep.event import EventHandle, EventOverlap


class Recorder:
    """Stands in for the CUDA stream, and writes down what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def record_event(self) -> str:
        self.calls.append("record")
        return "the mark"

    def wait_event(self, event: str) -> None:
        self.calls.append(f"wait for {event}")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A process that uses CUDA, whose current stream is a recorder."""
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: recorder)
    return recorder


def refuse(*args: object) -> None:
    raise AssertionError("CUDA was touched")


def test_without_cuda_a_handle_touches_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", refuse)
    # As Megatron writes it.
    event = EventOverlap(EventHandle())
    event.current_stream_wait()
    event.current_stream_wait()


def test_a_handle_marks_the_stream_at_construction_and_waits_on_the_stream_of_the_wait(
    stream: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = EventHandle()
    assert stream.calls == ["record"]
    other = Recorder()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: other)
    handle.current_stream_wait()
    assert (stream.calls, other.calls) == (["record"], ["wait for the mark"])


def test_waiting_without_an_event_is_refused_with_a_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"has no event.*async_finish=True.*\.$"):
        EventOverlap().current_stream_wait()


def test_a_released_event_cannot_be_waited_for_again(stream: Recorder) -> None:
    event = EventOverlap(EventHandle())
    event.current_stream_wait()
    event.current_stream_wait(release_handle=True)
    assert event.event is None
    with pytest.raises(RuntimeError, match="its event was released"):
        event.current_stream_wait()
    assert stream.calls == ["record", "wait for the mark", "wait for the mark"]


def test_the_hook_runs_once_and_after_the_wait(stream: Recorder) -> None:
    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(lambda: stream.calls.append("hook"))
    event.current_stream_wait()
    event.current_stream_wait()
    assert stream.calls == ["record", "wait for the mark", "hook", "wait for the mark"]


def test_a_second_hook_is_refused_until_the_first_has_run() -> None:
    event, calls = EventOverlap(EventHandle()), []
    event.register_hook_after_wait(lambda: calls.append(1))
    with pytest.raises(RuntimeError, match=r"already has the hook .* it holds one; .*\.$"):
        event.register_hook_after_wait(lambda: calls.append(2))
    event.current_stream_wait()
    event.register_hook_after_wait(lambda: calls.append(3))
    event.current_stream_wait()
    assert calls == [1, 3]


def test_a_hook_may_register_the_next_one() -> None:
    event, calls = EventOverlap(EventHandle()), []

    def first() -> None:
        calls.append(1)
        event.register_hook_after_wait(lambda: calls.append(2))

    event.register_hook_after_wait(first)
    event.current_stream_wait()
    assert calls == [1]
    event.current_stream_wait()
    assert calls == [1, 2]


def test_a_hook_that_raises_is_forgotten_and_the_event_released_as_asked() -> None:
    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(refuse)
    with pytest.raises(AssertionError, match="CUDA was touched"):
        event.current_stream_wait(release_handle=True)
    assert event.event is None
    event.register_hook_after_wait(lambda: None)


def test_a_with_block_waits_at_its_end(stream: Recorder) -> None:
    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(lambda: stream.calls.append("hook"))
    with event as entered:
        stream.calls.append("body")
    assert entered is event
    assert event.event is not None
    assert stream.calls == ["record", "body", "wait for the mark", "hook"]


def test_a_with_block_that_raises_still_waits(stream: Recorder) -> None:
    with pytest.raises(KeyError), EventOverlap(EventHandle()):
        raise KeyError
    assert stream.calls == ["record", "wait for the mark"]


def test_calling_the_event_sets_whether_the_with_block_releases_it(stream: Recorder) -> None:
    event = EventOverlap(EventHandle())
    with event():
        pass
    assert event.event is not None
    with event(release_handle=True) as entered:
        assert event.event is not None
    assert entered is event
    assert event.event is None
    assert stream.calls == ["record", "wait for the mark", "wait for the mark"]


def test_a_with_block_without_an_event_runs_the_hook_alone(stream: Recorder) -> None:
    # What a synchronous call returns can stand in the same `with` as what an asynchronous one returns.
    event = EventOverlap()
    event.register_hook_after_wait(lambda: stream.calls.append("hook"))
    with event:
        pass
    assert stream.calls == ["hook"]


def test_extra_tensors_live_as_long_as_the_event_and_no_longer() -> None:
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    event = EventOverlap(EventHandle(), (tensor,))
    del tensor
    event.current_stream_wait(release_handle=True)
    assert alive() is not None
    del event
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("hook", [None, lambda: None], ids=["without a hook", "with a hook that ran"])
def test_nothing_outlives_an_event(hook: Callable[[], object] | None) -> None:
    event = EventOverlap(EventHandle())
    if hook is not None:
        event.register_hook_after_wait(hook)
    event.current_stream_wait()
    alive = weakref.ref(event), weakref.ref(event.event)
    del event
    assert [reference() for reference in alive] == [None, None]


def test_utils_answers_with_the_same_classes() -> None:
    assert moe_ep.utils.EventHandle is EventHandle
    assert moe_ep.utils.EventOverlap is EventOverlap


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and PyTorch finds none")
def test_on_cuda_the_waiting_stream_sees_the_work_before_the_mark() -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    ones = torch.zeros(1 << 20, device="cuda").add_(1.0)
    assert ones.sum().item() == 1 << 20  # every kernel of this test is loaded before the clock runs
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
        ones.add_(1.0)
        event = EventOverlap(EventHandle(), (ones,))
    assert not side.query(), "the side stream must still be busy when the current stream begins to wait"
    with event(release_handle=True):
        pass
    total = ones.sum()
    assert total.item() == 2.0 * (1 << 20)
