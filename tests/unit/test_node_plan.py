"""A plan inside a node: what its two kernels are handed, and the handle that comes out of the counts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.backends.base import DispatchPlan
from moe_ep.backends.header import DTYPES, OPERATIONS
from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.backends.node_header import NEED_WORD, STATUS_WORD
from moe_ep.backends.plan_tensors import PlanTensors
from moe_ep.handle import DispatchHandle, Layout
from moe_ep.placement import ExpertPlacement
from tests.helpers.fake_exchange import FakeNode, Launch
from tests.unit.node_helpers import construct, fake_of, make_request, names

# Rank 0 owns experts 0, 1 and 2 (L = 3), rank 1 the others (L = 2).
PLACEMENT = ExpertPlacement.of([0, 0, 0, 1, 1], 2)
TOKENS = (4, 3)
RANK_ROWS = (3, 2, 1, 3)
PAIRS = ((3, 2), (4, 3))  # by rank, from each
COUNTS = ([3, 0, 2], [5, 2])  # by rank, of its experts


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return FakeNode(2).install(monkeypatch)


def answer(backend: IntranodeBackend, layout: Layout, alignment: int) -> int:
    """Counts for the next plan; returns R."""
    exchange, rank = fake_of(backend), backend.rank
    num_compact = RANK_ROWS[rank] + RANK_ROWS[2 + rank]
    padded = sum(-(-count // alignment) * alignment for count in COUNTS[rank])
    num_rows = padded if layout == "expert_major" else num_compact
    exchange.plan_rows = (num_compact, num_rows)
    exchange.plan_counts = (TOKENS, RANK_ROWS, PAIRS[rank], COUNTS[rank])
    return num_rows


def plan_on_both(
    node: FakeNode, backends: list[IntranodeBackend], layout: Layout, **changes: Any
) -> list[DispatchPlan]:
    def plan(rank: int) -> DispatchPlan:
        answer(backends[rank], layout, changes.get("alignment", 1))
        own = changes | {"x_needs_grad": rank == 0, "weights_need_grad": changes.get("topk_weights") is not None}
        if own.get("topk_weights") is not None:
            own["topk_weights"] = torch.ones(2 * TOKENS[rank], 2)[::2]
        request = make_request(TOKENS[rank], placement=PLACEMENT, layout=layout, num_channels=7, **own)
        return backends[rank].plan(request)

    return node.run(plan)


def inputs_of(launch: Launch) -> dict[str, Any]:
    return dict(vars(launch.arguments["plan"]))


@pytest.mark.parametrize(("layout", "alignment"), [("compact", 1), ("expert_major", 1), ("expert_major", 4)])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_plan_is_two_kernels_and_a_handle_with_the_counts_of_all(
    node: FakeNode, layout: Layout, alignment: int, weighted: bool
) -> None:
    backends = construct(node)
    weights = torch.ones(1) if weighted else None
    plans = plan_on_both(node, backends, layout, alignment=alignment, topk_weights=weights)
    for rank, (backend, plan) in enumerate(zip(backends, plans, strict=True)):
        assert names(backend) == ["plan_count", "plan_fill"]
        count, fill = fake_of(backend).launches
        assert fill.arguments["header"] == count.arguments["header"]
        assert fill.arguments["plan"] is count.arguments["plan"]
        handle, num_rows = plan.handle, answer(backend, layout, alignment)
        assert (handle.rank_tokens, handle.rank_rows) == (TOKENS, RANK_ROWS)
        assert handle.send_counts == RANK_ROWS[2 * rank : 2 * rank + 2]
        assert handle.recv_counts == RANK_ROWS[rank::2]
        assert handle.recv_pairs == PAIRS[rank]
        assert (handle.num_rows, handle.num_tokens, handle.num_channels) == (num_rows, TOKENS[rank], 7)
        assert (handle.x_needs_grad, handle.weights_need_grad) == (True, weighted), "rank 0 wants it, so both join"
        assert plan.real_tokens_per_expert == COUNTS[rank]
        assert plan.tokens_per_expert == [-(-count // alignment) * alignment for count in COUNTS[rank]]
        assert_filled(fill, plan, layout)
        assert (plan.row_weights is not None) == weighted
    first, second = (plan.handle.uid for plan in plans)
    assert first == second
    again = plan_on_both(node, backends, layout, alignment=alignment, topk_weights=weights)
    assert again[0].handle.uid == again[1].handle.uid != first, "another routing"


def assert_filled(fill: Launch, plan: DispatchPlan, layout: Layout) -> None:
    """plan_fill writes what the handle holds, and there is room for as much as it writes."""
    handle, arguments = plan.handle, fill.arguments
    num_compact = sum(handle.recv_counts)
    expert_major = layout == "expert_major"
    room, needed = (arguments["capacity"], arguments["num_rows"]), (num_compact, handle.num_rows)
    assert room == needed or (arguments["only_if_enough"] and room[0] >= needed[0] and room[1] >= needed[1])
    shapes = {
        "recv_token": (num_compact,),
        "pair_row": (num_compact if expert_major else 0, 2),
        "row_pair": (handle.num_rows if expert_major else 0,),
        "token_row": (handle.num_tokens, 2),
        "slot_rank": (handle.num_tokens, 2),
        "send_token": (sum(handle.send_counts),),
    }
    for name, shape in shapes.items():
        tensor = getattr(handle, name)
        assert tuple(tensor.shape) == shape, name
        assert arguments[name] == tensor.data_ptr(), name
    rows_shape = (handle.num_rows,) if expert_major else (handle.num_rows, 2)
    assert tuple(plan.row_idx.shape) == rows_shape
    assert arguments["row_idx"] == plan.row_idx.data_ptr()
    assert arguments["row_weights"] == (0 if plan.row_weights is None else plan.row_weights.data_ptr())
    assert plan.row_weights is None or tuple(plan.row_weights.shape) == rows_shape


def test_the_kernels_read_ids_and_weights_with_the_strides_they_have(node: FakeNode) -> None:
    backend = construct(node)[0]
    ids = torch.zeros(3, 2 * 4, dtype=torch.int32)[:, ::2].t()  # [4, 3], strides (2, 8)
    weights = torch.ones(4, 5, dtype=torch.float64)[:, :3]
    request = make_request(4, placement=PLACEMENT, topk_idx=ids, topk_weights=weights, alignment=4, max_rows=9)
    tensors = PlanTensors(backend._kernels, request, (0, 1), 0)
    given = vars(tensors.native)
    assert (given["ids"], given["id_bytes"]) == (ids.data_ptr(), 4)
    assert (given["id_stride_token"], given["id_stride_slot"]) == (2, 8)
    assert (given["weights"], given["weight_bytes"]) == (weights.data_ptr(), 8)
    assert (given["weight_stride_token"], given["weight_stride_slot"]) == (5, 1)
    assert (given["num_tokens"], given["num_topk"], given["num_experts"], given["num_local"]) == (4, 3, 5, 3)
    assert (given["alignment"], given["expert_major"], given["max_rows"]) == (4, False, 9)
    owner, local = PLACEMENT.kernel_tables(ids.device)
    assert (given["owner"], given["local_idx"]) == (owner.data_ptr(), local.data_ptr())
    assert (owner.tolist(), local.tolist()) == ([0, 0, 0, 1, 1], [0, 1, 2, 0, 1])
    assert tensors.published_bytes == 4 * 3 * (4 + 8) + 256
    handle = tensors_handle(tensors, request)
    assert handle.geometry.numel() == backend._kernels.geometry_length(2, 3)
    assert given["geometry"] == handle.geometry.data_ptr()


def tensors_handle(tensors: PlanTensors, request: Any) -> DispatchHandle:
    tensors.allocate()
    tensors.make_route(5)
    return tensors.handle(joins=True)


def test_the_header_of_a_plan_says_what_the_call_is(node: FakeNode) -> None:
    backends = construct(node)
    plan_on_both(node, backends, "expert_major", alignment=8, topk_weights=torch.ones(1))
    words = fake_of(backends[0]).launches[0].words
    op, _, handle, hidden, topk, experts, dtype, weights, layout, alignment, exact, grad, placement = words[:13]
    assert (OPERATIONS[op], handle, hidden, topk, experts) == ("dispatch", -1, 4, 2, 5)
    assert (DTYPES[dtype], DTYPES[weights]) == (torch.float32, torch.float32)
    assert (layout, alignment, exact, grad, placement) == (1, 8, 0, 1, PLACEMENT.fingerprint)
    assert words[STATUS_WORD:] == (0, 1, 1, TOKENS[0])
    assert words[NEED_WORD] == TOKENS[0] * 2 * (4 + 4) + 256


@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("grad_enabled", [False, True])
def test_a_plan_with_max_rows_waits_for_nothing_and_knows_no_counts(
    node: FakeNode, layout: Layout, grad_enabled: bool
) -> None:
    backend = construct(node)[1]  # rank 0 does not even take part
    weights = torch.ones(3, 2)
    request = make_request(
        3, placement=PLACEMENT, layout=layout, max_rows=9, topk_weights=weights, grad_enabled=grad_enabled
    )
    plan = backend.plan(request)
    count, fill = fake_of(backend).launches
    assert (count.name, fill.name, count.arguments["question"]) == ("plan_count", "plan_fill", 0)
    assert inputs_of(count)["max_rows"] == 9
    assert (fill.arguments["capacity"], fill.arguments["num_rows"], fill.arguments["send_token"]) == (9, 9, 0)
    handle = plan.handle
    assert not handle.is_known
    assert (handle.recv_counts, handle.rank_rows, handle.rank_tokens) == ((-1, -1), (-1,) * 4, (-1, -1))
    assert (handle.num_rows, handle.recv_token.numel(), handle.send_token.numel()) == (9, 9, 0)
    assert handle.pair_row.shape[0] == (9 if layout == "expert_major" else 0)
    assert (plan.tokens_per_expert, plan.real_tokens_per_expert) == (None, None)
    assert (plan.expert_counts.numel(), plan.expert_offsets.numel()) == (2, 3)
    assert handle.x_needs_grad == handle.weights_need_grad == grad_enabled, "nobody knows what the others want"


def test_rows_are_laid_out_before_the_counts_come_and_again_where_more_came_than_was_expected(node: FakeNode) -> None:
    """The second launch has exactly the room, the first left the plan as it was."""
    backends = construct(node)

    def plan(rank: int) -> DispatchPlan:
        exchange = fake_of(backends[rank])
        exchange.plan_rows = (100, 100)
        exchange.plan_counts = ((90, 10), (90, 90, 10, 10), (90, 10), [50, 50])
        return backends[rank].plan(make_request(4, world=2))

    for backend, made in zip(backends, node.run(plan), strict=True):
        assert names(backend) == ["plan_count", "plan_fill", "plan_fill"]
        _, early, late = fake_of(backend).launches
        assert (early.arguments["only_if_enough"], early.arguments["capacity"]) == (True, 7), "of 8 tokens 6, and 1"
        assert (late.arguments["only_if_enough"], late.arguments["capacity"]) == (False, 100)
        assert late.arguments["recv_token"] == made.handle.recv_token.data_ptr() != early.arguments["recv_token"]


def test_a_rank_without_memory_for_what_may_come_waits_for_what_does(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends, row_tensors = construct(node), PlanTensors._row_tensors

    def unless_expected(self: PlanTensors, *sizes: int) -> Any:
        if self._known is None:
            raise torch.OutOfMemoryError("no memory")
        return row_tensors(self, *sizes)

    monkeypatch.setattr(PlanTensors, "_row_tensors", unless_expected)
    for backend, plan in zip(backends, plan_on_both(node, backends, "expert_major"), strict=True):
        assert names(backend) == ["plan_count", "plan_fill"]
        assert not fake_of(backend).launches[1].arguments["only_if_enough"]
        assert_filled(fake_of(backend).launches[1], plan, "expert_major")


def test_a_rank_without_memory_for_its_rows_tells_the_others_that_it_is_done(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the verdict the others pull and wait for its done."""
    backends = construct(node)
    row_tensors = PlanTensors._row_tensors

    def unless_full(self: PlanTensors, *sizes: int) -> Any:
        if self._rank == 1:
            raise torch.OutOfMemoryError("no memory")
        return row_tensors(self, *sizes)

    monkeypatch.setattr(PlanTensors, "_row_tensors", unless_full)

    def plan(rank: int) -> str:
        answer(backends[rank], "compact", 1)
        try:
            backends[rank].plan(make_request(TOKENS[rank], placement=PLACEMENT))
        except torch.OutOfMemoryError as error:
            return str(error)
        return ""

    assert node.run(plan) == ["", "no memory"]
    assert names(backends[0]) == ["plan_count", "plan_fill"]
    assert names(backends[1]) == ["plan_count", "done_only"]
    count, done = fake_of(backends[1]).launches
    assert done.arguments["header"] == count.arguments["header"]


def test_a_plan_of_no_tokens_is_ordinary(node: FakeNode) -> None:
    backends = construct(node)

    def plan(rank: int) -> DispatchPlan:
        fake_of(backends[rank]).plan_counts = ((0, 0), (0,) * 4, (0, 0), [0, 0, 0][: 3 - rank])
        return backends[rank].plan(make_request(0, placement=PLACEMENT, layout="expert_major"))

    for plan_of_rank in node.run(plan):
        assert (plan_of_rank.handle.num_rows, plan_of_rank.handle.num_compact_rows) == (0, 0)


def test_a_block_of_every_gpu_has_room_to_count_as_many_experts_as_there_may_be() -> None:
    """`plan_block` of csrc/intranode/chunk.cuh takes as many warps as have room; 99 KB is what sm_86 and sm_89 have."""
    csrc = Path(__file__).parents[2] / "csrc"
    text = (csrc / "exchange" / "exchange.h").read_text() + (csrc / "intranode" / "chunk.cuh").read_text()

    def constant(name: str) -> int:
        found = re.search(rf"constexpr \w+ {name} = (\d+);", text)
        assert found is not None, f"csrc has no {name}"
        return int(found[1])

    columns = constant("kMaxLocalExperts") + constant("kMaxRanks")
    most_bytes = {"sm_86": 99 << 10, "sm_80": 163 << 10, "sm_90": 227 << 10}
    for num_tiles, warps in ((1, {"sm_86": 9, "sm_80": 16, "sm_90": 16}), (3, {"sm_86": 6, "sm_80": 11, "sm_90": 16})):
        of_warp = 4 * (num_tiles * constant("kTile") + columns)
        for arch, num_bytes in most_bytes.items():
            fit = min((num_bytes - constant("kStaticBytes")) // of_warp, constant("kPlanThreads") // 32)
            assert fit == warps[arch], (arch, num_tiles)
