"""The host side of the low-latency kernels, on kernels that run on the CPU: results, hooks, room, refusals, masks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.backends.base import Backend
from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.buffer import Buffer
from moe_ep.errors import ConfigError
from moe_ep.low_latency.mode import LowLatency
from moe_ep.low_latency.state import LowLatencyState
from moe_ep.placement import ExpertPlacement
from moe_ep.reference import dispatch_loop
from tests.distributed.conformance import owner_table
from tests.distributed.test_low_latency import OPTIONS, Options, least_max_tokens
from tests.distributed.test_low_latency_calls import without
from tests.gpu.low_latency_scene import Scene
from tests.helpers.fake_low_latency import FakeLowLatency, LowLatencyFakeKernels, LowLatencyNode
from tests.helpers.routing import ROUTINGS, make_inputs
from tests.unit.node_helpers import construct

PLAIN, HOOK = Options(), Options(hook=True)


class NodeBuffer(LowLatency):
    """What of a `Buffer` the low-latency calls use."""

    def __init__(self, backend: IntranodeBackend, owner: Sequence[int], enable_shrink: bool = False) -> None:
        self._backend, self._owner = backend, owner
        self._low_latency = LowLatencyState(enable_shrink)

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def rank(self) -> int:
        return self._backend.rank

    @property
    def group_size(self) -> int:
        return len(self._backend.ranks)

    def placement(self, num_experts: int) -> ExpertPlacement:
        return ExpertPlacement.of(self._owner, self.group_size)

    def check(self) -> None:
        if faults := self._backend.take_faults():
            raise RuntimeError(" ".join(faults))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    _closed = False
    reset, close = Buffer.reset, Buffer.close


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)


def scenes(
    world: int, routing: str = "random", tokens: str = "ragged", hidden: int = 64, num_topk: int = 3, seed: int = 0
) -> list[Scene]:
    owner = owner_table(2 * world + 1, world)
    inputs = make_inputs(routing, tokens, world, hidden, num_topk, len(owner), torch.bfloat16, seed)
    return [Scene(world, rank, inputs, owner, least_max_tokens(inputs)) for rank in range(world)]


def run(
    world: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[NodeBuffer, int], Any], enable_shrink: bool = False
) -> tuple[LowLatencyNode, list[Any]]:
    node = LowLatencyNode(world)
    node.install(monkeypatch)
    backends = construct(node)
    owner = owner_table(2 * world + 1, world)
    return node, node.run(lambda rank: work(NodeBuffer(backends[rank], owner, enable_shrink), rank))


def native_of(buffer: NodeBuffer) -> FakeLowLatency:
    node = buffer.backend.low_latency
    assert node is not None
    native = node._memory.native
    assert isinstance(native, FakeLowLatency)
    return native


# case E01, E02, I01, I02
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_addresses_shapes_and_handles_fit_what_the_kernels_are_promised(
    monkeypatch: pytest.MonkeyPatch, world: int, routing: str
) -> None:
    of_rank = scenes(world, routing)

    def work(buffer: NodeBuffer, rank: int) -> None:
        for option in (PLAIN, HOOK, PLAIN):
            of_rank[rank].round_trip(buffer, option)  # type: ignore[arg-type]

    run(world, monkeypatch, work)


@pytest.mark.parametrize("option", OPTIONS[::2], ids=str)
def test_every_option_of_deep_ep_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch, option: Options) -> None:
    of_rank = scenes(2, "holes", "equal", hidden=512)

    def work(buffer: Any, rank: int) -> None:
        scene = of_rank[rank]
        num_local = scene.owner.count(rank)
        cumulative, waits = torch.full((num_local,), 7, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        more = {"cumulative_local_expert_recv_stats": cumulative, "dispatch_wait_recv_cost_stats": waits}
        result = scene.dispatch(buffer, option, async_finish=not option.hook, **more)
        assert (result[3].event is None) == option.hook
        if option.hook:
            result[-1]()
        scene.check_dispatch(result, option)
        assert (cumulative - 7).tolist() == scene.expected.recv_count.tolist()
        assert waits.tolist() == [1, 1]
        made = scene.made(seed=3)
        wide = torch.full((len(scene.inputs[rank][0]), 1024), 5.0, dtype=torch.bfloat16)
        y, _, hook = scene.combine(buffer, result[2], made, out=wide[:, ::2], return_recv_hook=option.hook)
        if hook is not None:
            assert bool((y == 5.0).all())
            hook()
        scene.check_combine(y, made)
        assert bool((wide[:, 1::2] == 5.0).all())

    run(2, monkeypatch, work)


@pytest.mark.parametrize("in_order", [True, False])
def test_hooks_run_in_any_order_and_a_call_that_needs_an_unread_place_is_refused(
    monkeypatch: pytest.MonkeyPatch, in_order: bool
) -> None:  # case T04, T08
    batches = [scenes(2, seed=seed) for seed in range(2)]

    def work(buffer: Any, rank: int) -> None:
        own = [batch[rank] for batch in batches]
        sent = [scene.dispatch(buffer, HOOK) for scene in own]
        with pytest.raises(RuntimeError, match="2 results are in flight"):
            own[0].dispatch(buffer, PLAIN)
        order = (0, 1) if in_order else (1, 0)
        sent[order[0]][-1]()
        if not in_order:
            with pytest.raises(RuntimeError, match="two calls before it is in flight"):
                own[0].dispatch(buffer, PLAIN)
        sent[order[1]][-1]()
        for scene, result in zip(own, sent, strict=True):
            scene.check_dispatch(result, HOOK)
            scene.check_combine(scene.combine(buffer, result[2], scene.made(2))[0], scene.made(2))

    run(2, monkeypatch, work)


def test_memory_grows_with_need_on_all_ranks_and_not_once_a_graph_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large, larger = (scenes(2, hidden=hidden) for hidden in (64, 256, 1024))
    node = LowLatencyNode(2)
    node.install(monkeypatch)
    backends = construct(node)

    def each(work: Callable[[NodeBuffer, int], Any]) -> list[Any]:
        return node.run(lambda rank: work(NodeBuffer(backends[rank], small[0].owner), rank))

    sizes = []
    for of_rank in (small, large, small):
        each(lambda buffer, rank, of=of_rank: of[rank].round_trip(buffer))  # type: ignore[misc]
        sizes.append(each(lambda buffer, rank: native_of(buffer).bytes_a_slot))
    assert sizes[0][0] < sizes[1][0] == sizes[2][0]
    assert all(of_0 == of_1 for of_0, of_1 in sizes)
    node.is_capturing = True
    each(lambda buffer, rank: small[rank].round_trip(buffer))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="run the call once before the capture"):
        each(lambda buffer, rank: larger[rank].round_trip(buffer))  # type: ignore[arg-type]
    node.is_capturing = False

    def work(buffer: Any, rank: int) -> None:
        with pytest.raises(RuntimeError, match="cannot grow any more, because a CUDA graph holds"):
            larger[rank].round_trip(buffer)
        small[rank].round_trip(buffer)

    each(work)
    node.run(lambda rank: backends[rank].reset())
    each(lambda buffer, rank: small[rank].round_trip(buffer))  # type: ignore[arg-type]
    node.run(lambda rank: backends[rank].close())
    assert not any(ranks for name, ranks in node.opened.items() if name.startswith(b"lowlatency"))


def test_kernels_read_rows_at_multiples_of_16_bytes_wherever_the_caller_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_rank = scenes(1)
    seen: list[int] = []
    for name, attribute in (("dispatch", "x"), ("combine", "rows")):
        kernel = getattr(FakeLowLatency, name)

        def watched(self: Any, *given: Any, kernel: Any = kernel, attribute: str = attribute) -> None:
            seen.append(getattr(given[2], attribute) % 16)
            kernel(self, *given)

        monkeypatch.setattr(FakeLowLatency, name, watched)

    def shifted(rows: Tensor) -> Tensor:
        moved = torch.empty(rows.numel() + 1, dtype=rows.dtype)[1:].view(rows.shape).copy_(rows)
        assert moved.data_ptr() % 16
        return moved

    def work(buffer: Any, rank: int) -> None:
        scene = of_rank[rank]
        x, idx, weights = scene.own
        result = buffer.low_latency_dispatch(shifted(x), idx, scene.num_max, scene.num_experts, use_fp8=False)
        rows = scene.check_dispatch(result, PLAIN)
        y, _, _ = buffer.low_latency_combine(shifted(rows), idx, weights, result[2])
        aligned, _, _ = buffer.low_latency_combine(rows, idx, weights, result[2])
        assert torch.equal(y, aligned)

    run(1, monkeypatch, work)
    assert seen == [0, 0, 0]


def test_memory_does_not_grow_under_a_result_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = scenes(2), scenes(2, hidden=1024)

    def work(buffer: Any, rank: int) -> None:
        sent = small[rank].dispatch(buffer, HOOK)
        with pytest.raises(RuntimeError, match="cannot grow while the result of an earlier call lies in it"):
            large[rank].dispatch(buffer, PLAIN)
        sent[-1]()
        small[rank].check_dispatch(sent, HOOK)
        large[rank].round_trip(buffer)

    run(2, monkeypatch, work)


def test_a_hook_on_another_stream_keeps_the_memory_that_its_kernel_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[int, object]] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: kept.append((self.data_ptr(), stream)))
    of_rank = scenes(1)

    def work(buffer: Any, rank: int) -> None:
        scene = of_rank[rank]
        sent = scene.dispatch(buffer, HOOK)
        assert not kept
        own, other = torch.cuda.current_stream(), torch.cuda.Stream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: other)
        sent[-1]()
        scene.check_dispatch(sent, HOOK)
        assert other.past == [own]  # type: ignore[attr-defined]
        ticket = native_of(buffer).launches[-1][1].ticket
        assert {ticket, sent[2].routing.row_places.data_ptr()} <= {address for address, _ in kept}
        assert {stream for _, stream in kept} == {other}

    run(1, monkeypatch, work)


def test_calls_on_two_streams_follow_each_other_in_a_capture_and_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank = scenes(1)

    def work(buffer: Any, rank: int) -> None:
        scene, node = of_rank[rank], buffer.backend.low_latency
        streams = [torch.cuda.Stream() for _ in range(3)]
        captured: set[object] = set()

        def call_on(stream: Any) -> list[object]:
            past = len(stream.past)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream in captured)
            scene.dispatch(buffer, PLAIN)
            return list(stream.past[past:])

        @contextmanager
        def stream_of(stream: object) -> Iterator[None]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream in captured)
                yield

        monkeypatch.setattr(torch.cuda, "stream", stream_of)
        assert call_on(streams[0]) == []
        captured.update(streams[1:])
        assert call_on(streams[1]) == []
        assert call_on(streams[2]) == [streams[1]]
        captured.clear()
        assert call_on(streams[1]) == [streams[0]]
        captured.add(streams[0])
        assert call_on(streams[0]) == []  # the last captured call was of another graph
        assert node.num_calls == 5

    run(1, monkeypatch, work)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_blocks_of_all_ranks_of_a_gpu_find_room_with_some_to_spare(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    of_rank = scenes(world)
    monkeypatch.setattr(LowLatencyFakeKernels, "pci_bus_id", lambda self: "0000:01:00.0")

    def work(buffer: Any, rank: int) -> int:
        of_rank[rank].dispatch(buffer, PLAIN)
        return int(native_of(buffer).launches[-1][1].num_blocks)

    _, blocks = run(world, monkeypatch, work)
    assert blocks == [129 // world] * world


def test_the_ranks_of_a_gpu_are_counted_by_the_buffers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is made in the first call, when any device may be current."""
    of_rank, own = scenes(2), threading.local()

    @contextmanager
    def device(given: object) -> Iterator[None]:
        own.is_current = given == torch.device("cpu")  # that of the buffers here
        yield
        own.is_current = False

    def asked(answer: object) -> Any:
        def ask(self: LowLatencyFakeKernels) -> object:
            assert getattr(own, "is_current", False), "of whichever device is current"
            return answer

        return ask

    monkeypatch.setattr(LowLatencyFakeKernels, "pci_bus_id", asked("0000:01:00.0"))
    monkeypatch.setattr(LowLatencyFakeKernels, "num_sms", asked(132))

    node = LowLatencyNode(2)
    node.install(monkeypatch)
    buffers: list[Any] = [NodeBuffer(backend, of_rank[0].owner) for backend in construct(node)]
    monkeypatch.setattr(torch.cuda, "device", device)
    node.run(lambda rank: of_rank[rank].dispatch(buffers[rank], PLAIN))


def test_ranks_that_need_different_sizes_all_learn_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank = [scenes(2, hidden=64 * (1 + rank))[rank] for rank in range(2)]

    def work(buffer: Any, rank: int) -> None:
        with pytest.raises(ConfigError, match="disagree on M, H, K, E"):
            of_rank[rank].dispatch(buffer, PLAIN)

    run(2, monkeypatch, work)


def test_a_rank_that_refuses_tells_the_others_in_its_first_call_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank = scenes(2)

    def work(buffer: Any, rank: int) -> None:
        scene = of_rank[rank]
        x, idx, _ = scene.own
        with pytest.raises(RuntimeError if rank == 0 else ValueError, match="refused" if rank == 0 else "H = 63"):
            buffer.low_latency_dispatch(x[:, : 63 if rank else 64], idx, scene.num_max, 5, use_fp8=False)
        scene.round_trip(buffer)
        if rank == 1:
            with pytest.raises(TypeError, match="use_fp8=True"):
                buffer.low_latency_dispatch(x.float(), idx, scene.num_max, 5)
        else:
            scene.dispatch(buffer, PLAIN)
            with pytest.raises(RuntimeError, match="disagrees on M, H, K, E"):
                buffer.check()
        scene.round_trip(buffer)

    run(2, monkeypatch, work)


def test_a_mask_reaches_the_kernels_and_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank = scenes(3)

    def work(buffer: Any, rank: int) -> None:
        scene, status = of_rank[rank], torch.full((3,), 7, dtype=torch.int32)
        buffer.low_latency_update_mask_buffer(1, rank != 1)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, int(rank != 1), 0]
        scene.kept = without(scene.inputs, scene.owner, rank, [1])
        scene.round_trip(buffer)
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 0, 0]
        scene.kept = []
        assert dispatch_loop([i for _, i, _ in scene.inputs], [w for _, _, w in scene.inputs], scene.owner)[rank]
        scene.round_trip(buffer)

    run(3, monkeypatch, work, enable_shrink=True)


def test_what_the_kernels_cannot_move_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(buffer: Any, rank: int) -> None:
        x, idx = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64)
        for num_max, match in ((1 << 19, "M \\* K is 1572864"), (1, "but num_max_dispatch_tokens_per_rank is 1")):
            with pytest.raises(ValueError, match=match):
                buffer.low_latency_dispatch(x, idx, num_max, 3, use_fp8=False)

    run(1, monkeypatch, work)


def test_places_are_counted_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    node = LowLatencyNode(1)
    node.install(monkeypatch)
    (backend,) = construct(node)
    buffer: Any = NodeBuffer(backend, [0] * 4096)
    x, idx = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="M times the number of ranks times the most experts of a rank is 2147483648;"):
        buffer.low_latency_dispatch(x, idx, 1 << 19, 4096, use_fp8=False)


@pytest.mark.parametrize(
    ("name", "is_strided"),
    [
        ("cumulative_local_expert_recv_stats", True),
        ("cumulative_local_expert_recv_stats", False),
        ("dispatch_wait_recv_cost_stats", False),
        ("combine_wait_recv_cost_stats", False),
    ],
)
def test_statistics_that_a_kernel_cannot_add_to_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, is_strided: bool
) -> None:
    of_rank = scenes(1)
    size, dtype = (3, torch.int32) if name.startswith("cumulative") else (1, torch.int64)
    given = torch.zeros(2 * size, dtype=dtype)[::2] if is_strided else torch.zeros(size, dtype=dtype, device="meta")

    def work(buffer: Any, rank: int) -> None:
        scene = of_rank[rank]
        handle = scene.dispatch(buffer, PLAIN)[2]
        calls = {
            "dispatch": lambda: scene.dispatch(buffer, PLAIN, **{name: given}),
            "combine": lambda: scene.combine(buffer, handle, scene.made(1), **{name: given}),
        }
        with pytest.raises(ValueError, match=rf"{name} is on (cpu|meta) with a stride of [12]; .* contiguous on cpu"):
            calls["combine" if name.startswith("combine") else "dispatch"]()
        scene.round_trip(buffer)

    run(1, monkeypatch, work)
