"""What backend `intranode` hands to its kernels: addresses, sizes, strides, places, headers. The kernels are a fake."""

from __future__ import annotations

import pytest
import torch

from moe_ep.backends.header import DTYPES, OPERATIONS
from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.backends.node_header import NEED_WORD, STATUS_WORD
from moe_ep.backends.node_rows import POISON
from moe_ep.handle import DispatchHandle, Layout
from moe_ep.placement import ExpertPlacement
from tests.helpers.fake_exchange import FakeNode, Launch
from tests.unit.node_helpers import (
    NUM_COMPACT,
    NUM_EXPERTS,
    NUM_ROWS,
    NUM_TOKENS,
    NUM_TOPK,
    PATIENCE_SECS,
    RANK,
    RANK_ROWS,
    WORLD,
    construct,
    fake_of,
    make_handle,
    names,
    newest,
    on_cpu,
)

PLACES = slice(20, 25)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return FakeNode(WORLD).install(monkeypatch)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> IntranodeBackend:
    FakeNode(1).install(monkeypatch)
    return on_cpu(IntranodeBackend(None, PATIENCE_SECS))


def assert_along(launch: Launch, handle: DispatchHandle, operation: str, hidden: int, dtype: torch.dtype) -> None:
    """The header says what the handle and the rows say."""
    assert launch.arguments["num_match"] == 15
    words = launch.words[:15]
    op, _, uid, said_hidden, topk, experts, said_dtype, _, layout, alignment, _, _, placement, on_host, rounds = words
    assert (OPERATIONS[op], uid, placement, on_host, rounds) == (operation, 77, 88, 0, 1)
    assert (said_hidden, DTYPES[said_dtype]) == (hidden, dtype)
    assert (topk, experts, alignment) == (NUM_TOPK, NUM_EXPERTS, handle.alignment)
    assert layout == (handle.layout == "expert_major")
    assert launch.words[STATUS_WORD] == 0
    assert launch.arguments["num_topk"] == NUM_TOPK
    assert launch.arguments["geometry"] == handle.geometry.data_ptr()


# -- rows along a handle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["expert_major", "compact"])
def test_a_cached_dispatch_hands_over_the_rows_where_they_lie(node: FakeNode, layout: Layout) -> None:
    backend, handle = construct(node)[RANK], make_handle(layout)
    x = torch.zeros(NUM_TOKENS, 2 * 64, dtype=torch.bfloat16)[:, 64:]
    out = backend.dispatch(handle, x)
    launch = newest(backend)
    arguments = launch.arguments
    assert launch.name == "move"
    assert_along(launch, handle, "cached dispatch", 64, torch.bfloat16)
    assert arguments["rows"] == [(x.data_ptr(), 256, 128, out.data_ptr(), POISON[torch.bfloat16], 0)]
    assert (out.shape, out.dtype) == ((handle.num_rows, 64), torch.bfloat16)
    assert (arguments["num_tokens"], arguments["num_rows"]) == (NUM_TOKENS, handle.num_rows)
    assert (arguments["recv_token"], arguments["pair_row"]) == (
        handle.recv_token.data_ptr(),
        handle.pair_row.data_ptr(),
    )
    assert (arguments["num_local"], arguments["expert_major"]) == (3, layout == "expert_major")
    assert (arguments["weights"], arguments["made_rows"], arguments["grad_weights"]) == (0, 0, 0)
    assert (arguments["use_tma"], arguments["dtype"]) == (True, "bfloat16")
    assert not arguments["is_registered"]
    assert launch.words[PLACES] == (0, 0, 0, 0, 0)
    assert launch.words[NEED_WORD] == NUM_TOKENS * 128
    assert arguments["num_sms"] == backend.num_sms
    assert arguments["stream"] == backend.stream.cuda_stream


def test_rows_of_odd_width_travel_padded_and_come_back_as_wide_as_given(node: FakeNode) -> None:
    backend, handle = construct(node)[RANK], make_handle()
    out = backend.dispatch(handle, torch.ones(NUM_TOKENS, 3))
    launch = newest(backend)
    assert_along(launch, handle, "cached dispatch", 3, torch.float32)
    _, stride_bytes, row_bytes, address, _, _ = launch.arguments["rows"][0]
    assert (stride_bytes, row_bytes) == (16, 16)
    assert (tuple(out.shape), out.stride(), out.data_ptr()) == ((NUM_ROWS, 3), (4, 1), address)


def test_fp8_rows_and_their_scales_are_one_call(node: FakeNode) -> None:
    backend, handle = construct(node)[RANK], make_handle()
    x, scales = torch.zeros(NUM_TOKENS, 256, dtype=torch.uint8), torch.ones(NUM_TOKENS, 2)
    rows, received = backend.dispatch_scaled(handle, x, scales)
    launch = newest(backend)
    assert names(backend) == ["move"]
    (_, _, row_bytes, out, _, padding), (_, _, scale_bytes, out_scales, _, unit) = launch.arguments["rows"]
    assert (row_bytes, scale_bytes) == (256, 16)
    assert (out, out_scales) == (rows.data_ptr(), received.data_ptr())
    assert (padding, unit) == (0, 0x3F8000003F800000)
    assert (tuple(rows.shape), tuple(received.shape)) == ((NUM_ROWS, 256), (NUM_ROWS, 2))
    assert (rows.dtype, received.dtype) == (torch.uint8, torch.float32)
    assert launch.words[NEED_WORD] == NUM_TOKENS * (256 + 16)


def test_registered_rows_are_read_in_place(node: FakeNode) -> None:
    backends, handle = construct(node), make_handle()
    x = node.run(lambda rank: backends[rank].empty((NUM_TOKENS, 32), torch.float32))[RANK]
    backend = backends[RANK]
    backend.dispatch(handle, x)
    assert newest(backend).arguments["is_registered"]
    assert newest(backend).words[PLACES] == (1, 0, 128, 0, 0)
    backend.dispatch_scaled(handle, x[:, :28].view(torch.uint8), x[:, 28:])
    assert newest(backend).words[PLACES] == (1 | 1 << 8, 0, 128, 112, 128)
    assert newest(backend).arguments["is_registered"]
    backend.dispatch_scaled(handle, x[:, :28].view(torch.uint8), torch.ones(NUM_TOKENS, 4))
    assert not newest(backend).arguments["is_registered"], "the scales lie elsewhere"
    backend.dispatch(handle, x[:, 1:])
    assert not newest(backend).arguments["is_registered"], "what does not begin at 16 bytes is copied"


def test_a_weighted_combines_backward_moves_rows_times_weights(node: FakeNode) -> None:
    backends, handle = construct(node), make_handle()
    grad_y = node.run(lambda rank: backends[rank].empty((NUM_TOKENS, 8), torch.float32))[RANK]
    backend = backends[RANK]
    rows, weights = torch.ones(8, NUM_ROWS).t(), torch.ones(2 * NUM_ROWS)[::2]
    grad_rows, grad_weights = backend.combine_backward(handle, grad_y, rows, weights)
    launch = newest(backend)
    assert_along(launch, handle, "combine backward", 8, torch.float32)
    assert launch.name == "move"
    assert grad_weights is not None
    assert launch.arguments["rows"][0][3] == grad_rows.data_ptr()
    assert launch.arguments["grad_weights"] == grad_weights.data_ptr()
    assert launch.arguments["weights"] not in (0, weights.data_ptr()), "strided weights are made contiguous"
    assert launch.arguments["made_rows"] not in (0, rows.data_ptr())
    assert not launch.arguments["is_registered"], "what travels is not what lies there"
    assert (tuple(grad_rows.shape), tuple(grad_weights.shape)) == ((NUM_ROWS, 8), (NUM_ROWS,))

    _, none = backend.combine_backward(handle, grad_y, None, torch.ones(NUM_ROWS))
    assert none is None
    assert (newest(backend).arguments["made_rows"], newest(backend).arguments["grad_weights"]) == (0, 0)
    backend.combine_backward(handle, grad_y, None, None)
    assert newest(backend).arguments["weights"] == 0
    assert newest(backend).arguments["is_registered"]


# -- rows go home -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["expert_major", "compact"])
def test_a_combine_hands_over_contiguous_rows_and_gets_one_a_token(node: FakeNode, layout: Layout) -> None:
    backend, handle = construct(node)[RANK], make_handle(layout)
    rows = torch.zeros(handle.num_rows, 16, dtype=torch.float16)
    y = backend.combine(handle, rows, None, exact=False)
    launch = newest(backend)
    arguments = launch.arguments
    assert launch.name == "combine"
    assert_along(launch, handle, "combine", 16, torch.float16)
    assert (arguments["rows"], arguments["y"]) == (rows.data_ptr(), y.data_ptr())
    assert (tuple(y.shape), y.dtype) == ((NUM_TOKENS, 16), torch.float16)
    assert (arguments["num_rows"], arguments["num_tokens"]) == (handle.num_rows, NUM_TOKENS)
    assert (arguments["row_bytes"], arguments["num_compact_rows"]) == (32, NUM_COMPACT)
    assert (arguments["weights"], arguments["bias_0"], arguments["bias_1"]) == (0, 0, 0)
    assert (arguments["exact"], arguments["is_weighted"], arguments["is_registered"]) == (False, False, False)
    assert arguments["poison"] == POISON[torch.float16]
    assert [arguments[name] for name in ("pair_row", "token_row", "slot_rank")] == [
        tensor.data_ptr() for tensor in (handle.pair_row, handle.token_row, handle.slot_rank)
    ]
    assert launch.words[NEED_WORD] == RANK_ROWS[RANK] * 32, "the own rows do not lie in the slot"


def test_a_weighted_combine_with_bias_makes_all_of_them_contiguous(node: FakeNode) -> None:
    backend, handle = construct(node)[RANK], make_handle()
    rows = torch.ones(2 * NUM_ROWS, 5)[::2]
    bias = [torch.ones(5, NUM_TOKENS).t(), torch.ones(NUM_TOKENS, 5)]
    y = backend.combine(handle, rows, torch.ones(2 * NUM_ROWS)[::2], exact=False, bias=bias)
    launch = newest(backend)
    assert launch.arguments["row_bytes"] == 32
    assert launch.arguments["is_weighted"]
    assert launch.words[7] == DTYPES.index(torch.float32)
    given = {rows.data_ptr(), 0, *(tensor.data_ptr() for tensor in bias)}
    assert given.isdisjoint(launch.arguments[name] for name in ("rows", "weights", "bias_0", "bias_1"))
    assert tuple(y.shape) == (NUM_TOKENS, 5)


def test_registered_compact_rows_go_home_from_where_they_lie(node: FakeNode) -> None:
    backends = construct(node)
    rows = node.run(lambda rank: backends[rank].empty((NUM_ROWS, 8), torch.float32))[RANK]
    backends[RANK].combine(make_handle("compact"), rows[:NUM_COMPACT], None, exact=False)
    assert newest(backends[RANK]).arguments["is_registered"]
    assert newest(backends[RANK]).words[PLACES] == (1, 0, 32, 0, 0)
    backends[RANK].combine(make_handle("expert_major"), rows, None, exact=False)
    assert not newest(backends[RANK]).arguments["is_registered"], "those are summed first"


def test_an_exact_combine_says_where_its_parts_lie(node: FakeNode) -> None:
    backend, handle = construct(node)[RANK], make_handle()
    backend.combine(handle, torch.ones(NUM_ROWS, 32), None, exact=True)
    launch = newest(backend)
    assert launch.arguments["exact"]
    assert launch.words[10] == 1
    pairs_at, weights_at = launch.words[26:28]
    assert (pairs_at, weights_at) == (1536, 1536 + 256)  # 12 rows of 128 bytes, 7 x 2 places of 4 bytes
    assert launch.words[NEED_WORD] == weights_at + NUM_ROWS * 8


def test_the_backward_of_dispatch_sends_home_what_some_rank_wants(node: FakeNode) -> None:
    backend, handle = construct(node)[RANK], make_handle()
    grad_rows, grad_row_weights = torch.ones(NUM_ROWS, 8), torch.ones(NUM_ROWS)
    grad_x, grad_weights = backend.dispatch_backward(handle, grad_rows, grad_row_weights)
    assert names(backend) == ["combine", "numbers_home"]
    assert grad_x is not None
    assert grad_weights is not None
    first, second = fake_of(backend).launches
    assert_along(first, handle, "dispatch backward", 8, torch.float32)
    assert_along(second, handle, "dispatch backward", NUM_TOPK, torch.float32)
    assert first.arguments["y"] == grad_x.data_ptr()
    arguments = second.arguments
    assert (arguments["numbers"], arguments["out"]) == (grad_row_weights.data_ptr(), grad_weights.data_ptr())
    assert (arguments["pair_row"], arguments["num_compact_rows"]) == (handle.pair_row.data_ptr(), NUM_COMPACT)
    assert not arguments["sums"]
    assert tuple(grad_weights.shape) == (NUM_TOKENS, NUM_TOPK)
    assert second.words[NEED_WORD] == NUM_COMPACT * NUM_TOPK * 4

    unwanted = make_handle(x_needs_grad=False, weights_need_grad=False)
    assert backend.dispatch_backward(unwanted, grad_rows, grad_row_weights) == (None, None)
    assert len(names(backend)) == 2


def test_weights_of_compact_rows_are_summed_at_home(node: FakeNode) -> None:
    backend = construct(node)[RANK]
    weights = torch.ones(NUM_COMPACT, NUM_TOPK, dtype=torch.float64)
    out = backend.sum_weights(make_handle("compact"), weights)
    arguments = newest(backend).arguments
    assert (arguments["sums"], arguments["pair_row"], arguments["dtype"]) == (True, 0, "float64")
    assert (tuple(out.shape), out.dtype) == ((NUM_TOKENS, NUM_TOPK), torch.float64)


# -- the group's sums -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "travels_as"), [("int64", "int64"), ("float32", "float32"), ("bool", "int64"), ("uint8", "int64")]
)
def test_an_all_reduce_is_in_place_where_it_can_be(alone: IntranodeBackend, dtype: str, travels_as: str) -> None:
    tensor = torch.ones(3, 4, dtype=getattr(torch, dtype))
    assert alone.all_reduce(tensor) is tensor
    arguments = newest(alone).arguments
    assert (arguments["count"], arguments["dtype"]) == (12, travels_as)
    assert (arguments["out"] == tensor.data_ptr()) == (dtype == travels_as)
    alone.all_reduce(tensor.t())
    assert newest(alone).arguments["out"] != tensor.data_ptr(), "not over the elements of a strided view"


def test_counts_are_summed_in_a_copy(alone: IntranodeBackend) -> None:
    """Whoever hands in int64 counts finds them as they were."""
    counts = torch.tensor([3, 0, 5])
    assert alone.exchange_counts(counts, ExpertPlacement.balanced(3, 1)) == [3, 0, 5]
    assert newest(alone).arguments["out"] != counts.data_ptr()
