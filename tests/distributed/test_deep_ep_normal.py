"""DeepEP V1's own checks of its normal mode, re-expressed; the caller only changes the import."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep as deep_ep
from moe_ep.fp8 import quantize_1x128
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import device_of

HIDDEN, NUM_TOPK, NUM_TOKENS = 256, 4, 24
BACKENDS = ("torch",)
WORLDS = (2, 4, 8)


def calc_diff(a: Tensor, b: Tensor) -> float:
    """1 - 2 <a', b'> / (|a'|^2 + |b'|^2) in float64, with 1 added to both."""
    x, y = a.double() + 1, b.double() + 1
    return float(1 - 2 * (x * y).sum() / (x.square() + y.square()).sum())


class Routed:
    """Routing of one rank where the backend works, and of all of them, on the CPU, for the recounts."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        device = self.device = device_of(backend)
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.num_experts = 4 * self.world
        self.num_local = 4
        self.ids = []
        for rank in range(self.world):
            g = torch.Generator().manual_seed(100 + rank)
            scores = torch.rand(NUM_TOKENS, self.num_experts, generator=g)
            ids = scores.topk(NUM_TOPK, dim=1).indices
            ids[torch.rand(ids.shape, generator=g) < 0.1] = -1
            self.ids.append(ids)
        self.topk_idx = self.ids[self.rank].to(device, copy=True)
        g = torch.Generator().manual_seed(200 + self.rank)
        self.x = torch.randn(NUM_TOKENS, HIDDEN, generator=g).bfloat16().to(device)
        self.x_rank = torch.full((NUM_TOKENS, HIDDEN), float(self.rank + 1), device=device).bfloat16()
        self.weights = torch.randn(NUM_TOKENS, NUM_TOPK, generator=g).abs().to(device)
        self.weights_rank = torch.full((NUM_TOKENS, NUM_TOPK), float(self.rank + 1), device=device)

    def ranks_of(self, ids: Tensor) -> list[set[int]]:
        return [{int(e) // self.num_local for e in row if e >= 0} for row in ids]

    def received(self) -> list[tuple[int, int]]:
        """(source rank, source token) of every row that comes here, in order."""
        return [
            (source, token)
            for source in range(self.world)
            for token, ranks in enumerate(self.ranks_of(self.ids[source]))
            if self.rank in ranks
        ]


def check_layout(group: dist.ProcessGroup, backend: str) -> None:
    case = Routed(group, backend)
    with deep_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(case.topk_idx, case.num_experts)
    ranks = case.ranks_of(case.topk_idx)
    assert per_rank.dtype == per_expert.dtype == torch.int32
    assert per_rank.tolist() == [sum(r in token for token in ranks) for r in range(case.world)]
    assert per_node is None
    flat = case.topk_idx.flatten().tolist()
    assert per_expert.tolist() == [flat.count(e) for e in range(case.num_experts)]
    assert in_rank.tolist() == [[r in token for r in range(case.world)] for token in ranks]
    assert event.event is None


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_layout_equals_a_recount(ranks: Pools, backend: str, world: int) -> None:  # A1
    ranks.run(check_layout, world, backend)


def check_matrix(group: dist.ProcessGroup, backend: str) -> None:
    """previous_event x async x payload x with and without top-k: A2 to A8 in turn."""
    case = Routed(group, backend)
    with deep_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:
        payloads = {"random": case.x, "rank": case.x_rank, "rank fp8": _column_major_fp8(case.x_rank)}
        for previous, async_mode, (name, x), with_topk in itertools.product(
            (False, True), (False, True), payloads.items(), (False, True)
        ):
            _one_cell(case, buffer, previous, async_mode, name, x, with_topk)


def _column_major_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, scales = quantize_1x128(x)
    return rows, scales.t().contiguous().t()


def _dequantized(rows: object) -> Tensor:
    if isinstance(rows, tuple):
        data, scales = rows
        return (data.float() * scales.repeat_interleave(128, dim=1)).bfloat16()
    assert isinstance(rows, Tensor)
    return rows


def _one_cell(
    case: Routed, buffer: deep_ep.Buffer, previous: bool, async_mode: bool, name: str, x: object, with_topk: bool
) -> None:
    streams = {"async_finish": async_mode, "previous_event": buffer.capture() if previous else None}
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.topk_idx, case.num_experts, **streams)
    topk = {"topk_idx": case.topk_idx, "topk_weights": case.weights_rank} if with_topk else {}
    recv, idx, weights, counts, handle, event = buffer.dispatch(
        x,  # type: ignore[arg-type]
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        **topk,  # type: ignore[arg-type]
        **streams,
    )
    if async_mode:
        event.current_stream_wait()
    rows = _dequantized(recv)
    sources = case.received()
    assert rows.shape[0] == len(sources)  # A2
    everyone = torch.cat(case.ids).flatten().tolist()
    first = case.rank * case.num_local
    assert counts == [everyone.count(first + e) for e in range(case.num_local)]  # A2
    if name != "random":
        expected = torch.tensor([float(source + 1) for source, _ in sources]).unsqueeze(1).expand(rows.shape)
        assert_same_bits(rows, expected.bfloat16(), f"source of each row, {name}")  # A3
    assert handle is not None
    prefix = handle[0]
    assert [int(prefix[r, case.rank]) for r in range(case.world)] == [
        sum(source <= r for source, _ in sources) for r in range(case.world)
    ]
    if with_topk:
        _check_topk(case, idx, weights, counts, sources)
    cached = buffer.dispatch(x, handle=handle, **streams)  # type: ignore[arg-type]
    if async_mode:
        cached[-1].current_stream_wait()
    assert cached[1:5] == (None, None, None, None)
    assert_same_bits(_dequantized(cached[0]), rows, "cached rows")  # A7
    combined, combined_weights, event = buffer.combine(rows, handle, topk_weights=weights, **streams)
    if async_mode:
        event.current_stream_wait()
    num_ranks = torch.tensor([len(ranks) for ranks in case.ranks_of(case.topk_idx)], device=case.device).unsqueeze(1)
    original = case.x if name == "random" else case.x_rank
    assert calc_diff(combined.float() / num_ranks.clamp(min=1), original * (num_ranks > 0)) < 5e-6  # A8
    if with_topk:
        assert combined_weights is not None
        assert calc_diff(combined_weights, case.weights_rank * (case.topk_idx >= 0)) < 1e-9  # A8
    else:
        assert combined_weights is None


def _check_topk(
    case: Routed,
    idx: Tensor | None,
    weights: Tensor | None,
    counts: list[int] | None,
    sources: list[tuple[int, int]],
) -> None:
    assert idx is not None
    assert weights is not None
    assert counts is not None
    assert int(idx.min()) >= -1
    assert int(idx.max()) < case.num_local
    assert [int((idx == e).sum()) for e in range(case.num_local)] == counts  # A4
    sent = torch.tensor([float(source + 1) for source, _ in sources], device=case.device).unsqueeze(1)
    assert torch.equal(weights, sent.expand_as(weights) * (idx >= 0))  # A5, and 0 where the slot is not local


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_matrix_of_events_payloads_and_topk(ranks: Pools, backend: str, world: int) -> None:  # A2 - A5, A7, A8
    ranks.run(check_matrix, world, backend, timeout_secs=120)


def check_worst_tokens(group: dist.ProcessGroup, backend: str) -> None:
    case = Routed(group, backend)
    with deep_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.topk_idx, case.num_experts)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        topk = {"topk_idx": case.topk_idx, "topk_weights": case.weights}
        x, idx, weights, _, handle, _ = buffer.dispatch(case.x, **layout, **topk)  # type: ignore[arg-type]
        worst = NUM_TOKENS * case.world
        wide = buffer.dispatch(case.x, **layout, **topk, num_worst_tokens=worst)  # type: ignore[arg-type]
        assert wide[3] == []
        assert isinstance(x, Tensor)
        real = x.shape[0]
        for ours, exact in zip(wide[:3], (x, idx, weights), strict=True):
            assert isinstance(ours, Tensor)
            assert isinstance(exact, Tensor)
            assert ours.shape[0] == worst
            assert_same_bits(ours[:real], exact, "the real rows")
        assert bool((wide[1][real:] == -1).all())  # type: ignore[index]
        assert bool((wide[2][real:] == 0).all())  # type: ignore[index]
        assert wide[4] is not None
        assert handle is not None
        narrow = buffer.combine(x, handle)[0]
        assert_same_bits(buffer.combine(wide[0], wide[4])[0], narrow, "combine of the wide rows")  # type: ignore[arg-type]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_num_worst_tokens_pads_and_waits_for_nothing(ranks: Pools, backend: str, world: int) -> None:  # A6
    ranks.run(check_worst_tokens, world, backend)


def check_biases(group: dist.ProcessGroup, backend: str) -> None:
    """bias_0 + bias_1, then the ranks ascending, in float32, rounded once; a token without experts gets the biases."""
    case = Routed(group, backend)
    case.topk_idx[0] = -1
    case.ids[case.rank][0] = -1
    g = torch.Generator().manual_seed(7)
    biases = [torch.randn(NUM_TOKENS, HIDDEN, generator=g).bfloat16().to(case.device) for _ in range(2)]
    with deep_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.topk_idx, case.num_experts)
        recv, _, _, _, handle, _ = buffer.dispatch(
            case.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=case.topk_idx,
            topk_weights=case.weights,
        )
        assert handle is not None
        made = (recv.float() * (case.rank + 1)).bfloat16()  # type: ignore[union-attr]
        for given in (None, biases[0], (biases[0], biases[1])):
            combined, _, _ = buffer.combine(made, handle, bias=given)
            used = [] if given is None else biases[:1] if isinstance(given, Tensor) else biases
            for token, token_ranks in enumerate(case.ranks_of(case.topk_idx)):
                terms = [bias[token].float() for bias in used]
                terms += [(case.x[token].float() * (r + 1)).bfloat16().float() for r in sorted(token_ranks)]
                total = terms[0] if terms else torch.zeros(HIDDEN, device=case.device)
                for term in terms[1:]:
                    total = total + term
                assert_same_bits(combined[token], total.bfloat16(), f"token {token} with {len(used)} biases")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_combine_adds_biases_first_and_rounds_once(ranks: Pools, backend: str, world: int) -> None:  # A9
    ranks.run(check_biases, world, backend)


def check_repeats(group: dist.ProcessGroup, backend: str) -> None:
    case = Routed(group, backend)
    with deep_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.topk_idx, case.num_experts)
        seen = set()
        for _ in range(20):
            recv, idx, weights, _, handle, _ = buffer.dispatch(
                case.x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=case.topk_idx,
                topk_weights=case.weights,
            )
            assert handle is not None
            combined, summed, _ = buffer.combine(recv, handle, weights)  # type: ignore[arg-type]
            parts = [
                t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in (recv, idx, weights, combined, summed)
            ]  # type: ignore[union-attr]
            seen.add(b"".join(parts))
        assert len(seen) == 1


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_twenty_repeats_give_the_same_bytes(ranks: Pools, backend: str, world: int) -> None:  # A10
    ranks.run(check_repeats, world, backend)


def check_alignment(group: dist.ProcessGroup, backend: str) -> None:
    case = Routed(group, backend)
    with deep_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.topk_idx, case.num_experts)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        for topk in ({}, {"topk_idx": case.topk_idx, "topk_weights": case.weights}):
            plain = buffer.dispatch(case.x, **layout, **topk)  # type: ignore[arg-type]
            aligned = buffer.dispatch(case.x, **layout, **topk, expert_alignment=16)  # type: ignore[arg-type]
            assert plain[3] is not None
            assert aligned[3] == [-(-count // 16) * 16 for count in plain[3]]  # zero stays zero
            assert_same_bits(aligned[0], plain[0], "rows, which are not padded")  # type: ignore[arg-type]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_expert_alignment_rounds_only_the_reported_counts(ranks: Pools, backend: str, world: int) -> None:
    ranks.run(check_alignment, world, backend)


def check_tuple_of_handle(group: dist.ProcessGroup, backend: str) -> None:
    """The six tensors against loops over tokens and channels."""
    case = Routed(group, backend)
    with deep_ep.Buffer(group, backend=backend, num_sms=6, timeout_secs=20) as buffer:  # 3 channels of 8 tokens
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.topk_idx, case.num_experts)
        handle = buffer.dispatch(
            case.x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=case.topk_idx, topk_weights=case.weights,
        )[4]  # fmt: skip
    assert handle is not None
    rank_prefix, channel_prefix, recv_channel_prefix, recv_src, is_in_rank, send_head = handle
    assert len(handle) == 6
    assert recv_src.tolist() == [token for _, token in case.received()]
    assert torch.equal(is_in_rank, in_rank)
    assert rank_prefix.dtype == channel_prefix.dtype == recv_channel_prefix.dtype == send_head.dtype == torch.int32
    for peer, channel in itertools.product(range(case.world), range(3)):
        before = [peer in ranks for ranks in case.ranks_of(case.topk_idx)[: (channel + 1) * 8]]
        assert int(channel_prefix[peer, channel]) == sum(before)
        begins = [case.rank in ranks for ranks in case.ranks_of(case.ids[peer])[: channel * 8]]
        assert int(recv_channel_prefix[peer, channel]) == sum(begins)
        place = 0
        for token in range(channel * 8, (channel + 1) * 8):
            goes = peer in case.ranks_of(case.topk_idx)[token]
            assert int(send_head[token, peer]) == (place if goes else -1)
            place += goes


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_handle_unpacks_as_deep_eps_tuple(ranks: Pools, backend: str, world: int) -> None:
    ranks.run(check_tuple_of_handle, world, backend)


def check_refused_dispatches(group: dist.ProcessGroup, backend: str) -> None:
    """Each is refused on every rank although only rank 1 errs, and the buffer goes on."""
    case = Routed(group, backend)
    with deep_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:
        good = _arguments(case, buffer)
        recv, _, _, _, handle, _ = buffer.dispatch(**good)
        wrong = [
            ({"is_token_in_rank": None}, "neither a handle nor"),
            ({"topk_weights": None}, "belong together"),
            ({"handle": handle}, "a handle holds the routing"),
            ({"x": (case.x, case.weights)}, "FP8 rows are"),
            ({"allocate_on_comm_stream": True}, "without previous_event"),
            ({"expert_alignment": 0}, "at least 1"),
            ({"expert_alignment": 2**31}, "padded rows are counted in 32 bits"),
        ]
        for change, sentence in wrong:
            with pytest.raises((ValueError, TypeError), match=f"EP rank 1 refused dispatch: .*{sentence}"):
                buffer.dispatch(**(good | (change if case.rank == 1 else {})))
        assert_same_bits(buffer.dispatch(**good)[0], recv, "a call after the refused ones")  # type: ignore[arg-type]


def _arguments(case: Routed, buffer: deep_ep.Buffer) -> dict[str, Any]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.topk_idx, case.num_experts)
    return {
        "x": case.x, "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert, "topk_idx": case.topk_idx, "topk_weights": case.weights,
    }  # fmt: skip


def _refused_combines(group: dist.ProcessGroup, backend: str) -> None:
    case = Routed(group, backend)
    with deep_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:
        good = _arguments(case, buffer)
        recv, _, weights, _, handle, _ = buffer.dispatch(**good)
        wrong = [
            ({"x": recv[1:]}, "handle stands for"),
            ({"topk_weights": weights[:, 1:]}, "topk_weights is"),  # type: ignore[index]
            ({"bias": case.x[1:]}, "bias is"),
            ({"bias": case.x.float()}, "bias is"),
        ]
        for change, sentence in wrong:
            arguments = {"x": recv, "handle": handle, "topk_weights": weights}
            with pytest.raises((ValueError, TypeError), match=f"EP rank 1 refused combine: .*{sentence}"):
                buffer.combine(**(arguments | (change if case.rank == 1 else {})))  # type: ignore[arg-type]
        assert_same_bits(buffer.dispatch(**good)[0], recv, "a call after the refused ones")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_rank_gets_wrong_is_refused_on_all(ranks: Pools, backend: str) -> None:
    ranks.run(check_refused_dispatches, 2, backend)
    ranks.run(_refused_combines, 2, backend)
