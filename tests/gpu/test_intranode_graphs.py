"""CUDA graphs inside a node: epochs live on the device, so replays and eager calls mix, whatever a graph holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.backends.node_calls import START_BYTES
from tests.gpu.busy import keep_busy
from tests.gpu.test_intranode_streams import NUM_EXPERTS, copies_of, make
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import Setup, assert_works, caught, open_buffer

pytestmark = pytest.mark.gpu
NUM_REPLAYS = 30


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which runs twice before on a side stream, as PyTorch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _cached(group: dist.ProcessGroup, num_combines: int, asynchronous: bool) -> None:
    """Cached dispatch and `num_combines` combines in a graph; between replays 0, 1 or 2 eager calls."""
    with open_buffer(group, "intranode") as buffer:
        base, idx, _ = make(buffer.rank, 0)
        x = base.clone()
        handle = moe_ep.dispatch(buffer, x, idx, num_experts=NUM_EXPERTS, layout="compact").handle
        assert isinstance(handle, moe_ep.DispatchHandle)
        copies = copies_of(idx, buffer.group_size)
        outputs: list[Tensor] = []

        def work() -> None:
            rows, *_, event = buffer.dispatch(x, handle=handle, async_finish=asynchronous)
            if asynchronous:
                event.current_stream_wait()
            assert isinstance(rows, Tensor)
            outputs[:] = [rows]
            for i in range(num_combines):
                y, _, event = buffer.combine(rows * (i + 1), handle, async_finish=asynchronous)
                if asynchronous:
                    event.current_stream_wait()
                outputs.append(y)

        graph = captured(work)
        static = list(outputs)
        for replay in range(NUM_REPLAYS):
            x.copy_(base * (replay % 5 + 1))
            if buffer.rank == 0 and replay % 10 == 3:
                keep_busy(20)
            graph.replay()
            for i, y in enumerate(static[1:]):
                assert torch.equal(y, x * copies * (i + 1)), f"y {i} of replay {replay}"
            rows, *_, event = buffer.dispatch(x, handle=handle, async_finish=True)
            event.current_stream_wait()
            assert isinstance(rows, Tensor)
            assert torch.equal(static[0], rows), f"rows of replay {replay}"
            for _ in range(replay % 3):
                out = moe_ep.dispatch(buffer, x, idx, num_experts=NUM_EXPERTS)
                assert torch.equal(moe_ep.combine(buffer, out.x, out.handle), x * (idx >= 0).sum(1, keepdim=True))
        buffer.check()
        assert_works(buffer, group, Setup("intranode", "compact", buffer.group_size))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_combines", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_graphs_of_one_two_and_three_calls_replay_among_eager_calls(
    ranks: Pools, world: int, num_combines: int, asynchronous: bool
) -> None:  # case O06
    ranks.run(_cached, world, num_combines, asynchronous)


def _max_rows(group: dist.ProcessGroup, layout: str, max_rows: int, overflows: bool) -> str:
    """A whole step in a graph (dispatch with max_rows, combine, backward) for changing routings; then an overflow."""
    with open_buffer(group, "intranode") as buffer:
        x, idx, weights = make(buffer.rank, 0)
        x.requires_grad_()
        weights.requires_grad_()
        results: list[Tensor] = []

        def step(limit: int | None) -> list[Tensor]:
            out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=NUM_EXPERTS, layout=layout, max_rows=limit)
            given = out.topk_weights if layout == "expert_major" else None
            y = moe_ep.combine(buffer, out.x * 2, out.handle, given)
            assert out.topk_weights is not None
            total = y.sum() + out.topk_weights.sum()
            return [y.detach(), *torch.autograd.grad(total, (x, weights)), out.expert_counts]

        def work() -> None:
            results[:] = step(max_rows)

        graph = captured(work)
        static = list(results)
        for replay in range(NUM_REPLAYS):
            values, ids, given = make(buffer.rank, replay)
            with torch.no_grad():
                x.copy_(values)
                idx.copy_(ids if replay % 7 else ids.fill_(-1))
                weights.copy_(given)
            graph.replay()
            ours = [tensor.clone() for tensor in static]
            for name, tensor, expected in zip(("y", "dx", "dw", "counts"), ours, step(None), strict=True):
                assert_same_bits(tensor, expected, f"{name} of replay {replay}")
        buffer.check()
        with torch.no_grad():
            idx.fill_(0)
        graph.replay()
        torch.cuda.synchronize()
        text = caught(buffer.check)[1]
        assert bool(static[0].isnan().all()) == overflows
        assert_works(buffer, group, Setup("intranode", layout, buffer.group_size))
        return text


@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_training_step_with_max_rows_replays_for_any_routing(ranks: Pools, world: int, layout: str) -> None:
    # More than the random routings need, and less than the last one does, which names expert 0 in every slot.
    max_rows = {("compact", 1): 600, ("compact", 2): 1100}.get((layout, world), 1750)
    num_rows = 600 * world * (3 if layout == "expert_major" else 1)
    first, *others = ranks.run(_max_rows, world, layout, max_rows, num_rows > max_rows, timeout_secs=90)
    assert (f"received {num_rows} rows on EP rank 0" in first) == (num_rows > max_rows)
    assert others == [""] * (world - 1)


def _two_graphs(group: dist.ProcessGroup) -> None:
    """Two buffers, each with a graph of an odd number of calls, replayed in turn."""
    with open_buffer(group, "intranode") as a, open_buffer(group, "intranode") as b:
        x, idx, _ = make(a.rank, 1)
        handles = [
            moe_ep.dispatch(buffer, x, idx, num_experts=NUM_EXPERTS, layout="compact").handle for buffer in (a, b)
        ]
        outputs: dict[int, Tensor] = {}

        def work(i: int) -> None:
            handle = handles[i]
            assert isinstance(handle, moe_ep.DispatchHandle)
            rows = (a, b)[i].dispatch(x, handle=handle)[0]
            assert isinstance(rows, Tensor)
            outputs[i] = (a, b)[i].combine(rows, handle)[0]
            if i:
                outputs[2] = b.combine(rows + rows, handle)[0]

        graphs = [captured(lambda i=i: work(i)) for i in (0, 1)]
        expected = x * copies_of(idx, a.group_size)
        for replay in range(NUM_REPLAYS):
            for i in (0, 1) if replay % 2 else (1, 0, 0):
                graphs[i].replay()
            assert torch.equal(outputs[0], expected), replay
            assert torch.equal(outputs[1], expected), replay
            assert torch.equal(outputs[2], 2 * expected), replay


def test_graphs_of_two_buffers_replay_in_turn(ranks: Pools) -> None:
    ranks.run(_two_graphs, 2)


def _not_capturable(group: dist.ProcessGroup) -> tuple[type[BaseException] | None, str]:
    with open_buffer(group, "intranode") as buffer:
        x, idx, _ = make(buffer.rank, 2)

        def capture() -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                moe_ep.dispatch(buffer, x, idx, num_experts=NUM_EXPERTS)

        seen = caught(capture)
        torch.cuda.synchronize()
        assert_works(buffer, group, Setup("intranode", "compact", buffer.group_size))
        return seen


def test_a_dispatch_that_waits_says_that_a_graph_cannot(ranks: Pools) -> None:  # case O06
    for kind, text in ranks.run(_not_capturable, 2):
        assert kind is RuntimeError
        assert "give max_rows" in text


def _no_growth(group: dist.ProcessGroup) -> tuple[type[BaseException] | None, str]:
    """Rank 0 alone needs more than there is, after a capture; then the graph still replays."""
    with open_buffer(group, "intranode") as buffer:
        x, idx, _ = make(buffer.rank, 3)
        handle = moe_ep.dispatch(buffer, x, idx, num_experts=NUM_EXPERTS, layout="compact").handle
        assert isinstance(handle, moe_ep.DispatchHandle)
        ys: list[Tensor] = []

        def work() -> None:
            rows = buffer.dispatch(x, handle=handle)[0]
            assert isinstance(rows, Tensor)
            ys[:] = [buffer.combine(rows, handle)[0]]

        graph = captured(work)
        static = ys[0]
        num_tokens = START_BYTES // 4096 + 1 if buffer.rank == 0 else 1
        large = torch.ones(num_tokens, 1024, device="cuda")
        ids = torch.zeros(num_tokens, 1, dtype=torch.int64, device="cuda")
        seen = caught(lambda: moe_ep.dispatch(buffer, large, ids, num_experts=NUM_EXPERTS))
        graph.replay()
        assert_same_bits(static, x * copies_of(idx, buffer.group_size) + 0.0, "y after the refusal")
        assert_works(buffer, group, Setup("intranode", "compact", buffer.group_size))
        return seen


def test_memory_that_a_graph_holds_does_not_move(ranks: Pools) -> None:
    for kind, text in ranks.run(_no_growth, 2):
        assert kind is RuntimeError
        assert "cannot grow any more, because a CUDA graph holds addresses in it" in text
