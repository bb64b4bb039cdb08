"""What a reset, a close or a graph comes between: hooks refuse and touch nothing, old words pass for no new ones."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ep
from tests.helpers.fake_low_latency import LowLatencyNode
from tests.unit.node_helpers import construct
from tests.unit.test_low_latency_node import HOOK, PLAIN, NodeBuffer, native_of, run, scenes


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)


def test_a_reset_between_the_halves_of_a_call_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """case T04: its words belong to the old generation, and nothing has written where its rows lie."""
    of_rank = scenes(2)

    def work(buffer: Any, rank: int) -> None:
        scene = of_rank[rank]
        taken, open_one = (scene.dispatch(buffer, HOOK) for _ in range(2))
        taken[-1]()
        num_launches = len(native_of(buffer).launches)
        buffer.reset()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"low_latency_dispatch were in flight when Buffer.reset\(\) was"):
                open_one[-1]()
        assert len(native_of(buffer).launches) == num_launches
        scene.round_trip(buffer, HOOK)
        with pytest.raises(RuntimeError, match="already run"):
            taken[-1]()

    run(2, monkeypatch, work)


def test_rows_that_a_reset_has_lost_are_not_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank = scenes(1)

    def work(buffer: Any, rank: int) -> None:
        scene = of_rank[rank]
        lost = scene.dispatch(buffer, HOOK)
        buffer.reset()
        with pytest.raises(RuntimeError, match="the rows of the dispatch that made this handle were in flight"):
            scene.combine(buffer, lost[2], scene.made(1))
        scene.round_trip(buffer)

    run(1, monkeypatch, work)


@pytest.mark.parametrize("ends", ["reset", "close"])
def test_hooks_of_the_portable_form_are_lost_alike(ends: str) -> None:
    x, idx = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64)
    buffer = moe_ep.Buffer()
    recv, _, _, _, hook = buffer.low_latency_dispatch(x, idx, 4, 1, use_fp8=False, return_recv_hook=True)
    getattr(buffer, ends)()
    assert hook is not None
    with pytest.raises(RuntimeError, match=rf"in flight when Buffer\.{ends}\(\) was called, and are lost"):
        hook()
    assert isinstance(recv, Tensor)
    assert not recv.any()


def test_a_hook_behind_a_close_touches_no_memory_of_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank = scenes(1)

    def work(buffer: Any, rank: int) -> None:
        sent = of_rank[rank].dispatch(buffer, HOOK)
        native = native_of(buffer)
        buffer.close()
        num_launches = len(native.launches)
        with pytest.raises(RuntimeError, match=r"in flight when Buffer\.close\(\) was called"):
            sent[-1]()
        assert len(native.launches) == num_launches

    run(1, monkeypatch, work)


@pytest.mark.parametrize("captures_call", [True, False])
def test_a_capture_between_the_halves_of_a_call_is_refused_and_the_hook_can_still_run(
    monkeypatch: pytest.MonkeyPatch, captures_call: bool
) -> None:
    of_rank = scenes(1)
    node = LowLatencyNode(1)
    node.install(monkeypatch)
    (backend,) = construct(node)
    buffer: Any = NodeBuffer(backend, of_rank[0].owner)
    of_rank[0].round_trip(buffer)  # makes room
    node.is_capturing = captures_call
    sent = of_rank[0].dispatch(buffer, HOOK)
    node.is_capturing = not captures_call
    with pytest.raises(RuntimeError, match="outside a capture" if captures_call else "inside a capture"):
        sent[-1]()
    with pytest.raises(RuntimeError, match="has not run"):
        of_rank[0].combine(buffer, sent[2], of_rank[0].made(1))
    node.is_capturing = captures_call
    sent[-1]()
    of_rank[0].check_dispatch(sent, HOOK)


def test_a_generation_knows_no_words_of_one_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations are counted in 12 bits, 16 of them for each reset: 256 resets later the same number comes again."""
    node = LowLatencyNode(2)
    node.install(monkeypatch)
    backends = construct(node)
    batches = [scenes(2, seed=seed) for seed in range(2)]
    buffers: list[Any] = [NodeBuffer(backend, batches[0][0].owner) for backend in backends]

    def late(*given: Any, kernel: Any) -> None:
        time.sleep(0.2)  # rank 0 looks for words before they are there
        kernel(*given)

    def work(rank: int) -> None:
        batches[0][rank].round_trip(buffers[rank])
        buffers[rank].reset()
        batches[0][rank].round_trip(buffers[rank])
        backends[rank]._memory.generation += 255
        buffers[rank].reset()
        native: Any = native_of(buffers[rank])
        if rank == 1:
            native.dispatch = partial(late, kernel=native.dispatch)
        batches[1][rank].round_trip(buffers[rank])

    node.run(work)


def test_a_close_waits_for_the_last_call_before_it_asks_who_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call may have been made on any stream; the question is asked on the buffer's own."""
    of_rank, seen = scenes(1), []

    def work(buffer: Any, rank: int) -> None:
        of_rank[rank].dispatch(buffer, PLAIN)
        native = native_of(buffer)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(native.launches[-1][0]))
        buffer.close()

    run(1, monkeypatch, work)
    assert seen[:2] == ["dispatch", "drain"]


def test_a_reset_has_opened_the_mask_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call may come on another stream."""

    def work(buffer: Any, rank: int) -> None:
        scenes(1)[0].round_trip(buffer)
        buffer.backend.low_latency.mask.fill_(2)
        stream: Any = torch.cuda.current_stream()
        before = stream.num_synchronizes
        buffer.reset()
        assert buffer.backend.low_latency.mask.tolist() == [0]
        assert stream.num_synchronizes == before + 1

    run(1, monkeypatch, work)


def test_a_first_call_in_a_capture_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it made would belong to the graph, and be filled by none but its replays."""
    of_rank = scenes(1)
    node = LowLatencyNode(1)
    node.install(monkeypatch)
    (backend,) = construct(node)
    buffer: Any = NodeBuffer(backend, of_rank[0].owner, enable_shrink=True)
    node.is_capturing = True
    for call in (lambda: of_rank[0].dispatch(buffer, PLAIN), lambda: buffer.low_latency_update_mask_buffer(0, True)):
        with pytest.raises(RuntimeError, match="run the call once before the capture"):
            call()
    node.is_capturing = False
    assert "low_latency" not in vars(backend)
    of_rank[0].round_trip(buffer)


def test_a_mask_changes_between_calls_on_whatever_streams_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank = scenes(1)

    def work(buffer: Any, rank: int) -> None:
        scene, node = of_rank[rank], buffer.backend.low_latency
        own, other, third = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()

        def on(stream: Any, call: Any) -> list[object]:
            past = len(stream.past)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
            call()
            return list(stream.past[past:])

        def mask() -> None:
            buffer.low_latency_update_mask_buffer(0, False)

        on(own, lambda: scene.dispatch(buffer, PLAIN, async_finish=True))
        assert on(own, mask) == [node.own_stream]
        sent = scene.dispatch(buffer, HOOK)
        on(other, sent[-1])
        assert on(own, buffer.low_latency_clean_mask_buffer) == [other]
        assert on(own, mask) == []
        assert on(third, lambda: scene.dispatch(buffer, PLAIN)) == [own]

        sent = []
        on(own, lambda: sent.extend(scene.dispatch(buffer, HOOK)))
        on(other, lambda: scene.dispatch(buffer, PLAIN))
        on(own, sent[-1])  # on the stream of its own call, which is no longer the last one
        assert on(other, mask) == [own]

    run(1, monkeypatch, work, enable_shrink=True)
