"""DeepEP V1's own checks of its normal mode on the kernels: the cases of the portable tests, FP8 rows, SM budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep as deep_ep
from moe_ep.fp8 import UNIT_SCALE
from tests.distributed.test_deep_ep_normal import (
    NUM_TOKENS,
    Routed,
    check_alignment,
    check_biases,
    check_layout,
    check_matrix,
    check_refused_dispatches,
    check_repeats,
    check_tuple_of_handle,
    check_worst_tokens,
)
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools

pytestmark = pytest.mark.gpu
BACKEND = "intranode"
CHECKS = [check_layout, check_matrix, check_worst_tokens, check_biases, check_repeats, check_alignment]


@pytest.mark.parametrize("check", [*CHECKS, check_tuple_of_handle], ids=lambda check: check.__name__)
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_normal_mode_of_deep_ep(
    ranks: Pools, check: Callable[[dist.ProcessGroup, str], None], world: int
) -> None:  # A1 - A10
    ranks.run(check, world, BACKEND, timeout_secs=100)


def test_what_one_rank_gets_wrong_is_refused_on_all(ranks: Pools) -> None:
    ranks.run(check_refused_dispatches, 2, BACKEND)


def _layout_of(case: Routed, buffer: deep_ep.Buffer) -> dict[str, Any]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.topk_idx, case.num_experts)
    return {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}


def _fp8(rank: int, hidden: int, num_scales: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random codes, NaN and infinities among them, and random scales."""
    g = torch.Generator().manual_seed(300 + rank)
    rows = torch.randint(0, 256, (NUM_TOKENS, hidden), generator=g, dtype=torch.uint8)
    scales = torch.randint(1, 2**30, (NUM_TOKENS, num_scales), generator=g, dtype=torch.int32)
    return rows.view(torch.float8_e4m3fn), scales.view(scale_dtype)


def _fp8_rows(group: dist.ProcessGroup, hidden: int, num_scales: int, scale_dtype: torch.dtype) -> None:
    """Rows and scales arrive with the bits that were sent: first, cached, asynchronous and with num_worst_tokens."""
    case = Routed(group, BACKEND)
    sent = [_fp8(rank, hidden, num_scales, scale_dtype) for rank in range(case.world)]
    where = case.received()
    expected = []
    for kind, dtype in enumerate((torch.float8_e4m3fn, scale_dtype)):
        all_bytes = [tensors[kind].view(torch.uint8) for tensors in sent]
        expected.append(torch.stack([all_bytes[source][token] for source, token in where]).view(dtype))
    rows, scales = (tensor.cuda() for tensor in sent[case.rank])
    column_major = scales.t().contiguous().t()
    with deep_ep.Buffer(group, backend=BACKEND, timeout_secs=20) as buffer:
        layout, topk = _layout_of(case, buffer), {"topk_idx": case.topk_idx, "topk_weights": case.weights}
        for given in (scales, column_major):
            received, _, _, _, handle, _ = buffer.dispatch((rows, given), **layout, **topk)
            _assert_fp8(received, expected, "first")
            _assert_fp8(buffer.dispatch((rows, given), handle=handle)[0], expected, "cached")
            received, *_, event = buffer.dispatch((rows, given), handle=handle, async_finish=True)
            event.current_stream_wait()
            _assert_fp8(received, expected, "asynchronous")
        worst = NUM_TOKENS * case.world
        received = buffer.dispatch((rows, scales), **layout, **topk, num_worst_tokens=worst)[0]
        assert isinstance(received, tuple)
        _assert_fp8((received[0][: len(where)], received[1][: len(where)]), expected, "num_worst_tokens")
        assert not bool(received[0][len(where) :].view(torch.uint8).any())
        assert bool((received[1][len(where) :] == UNIT_SCALE[scale_dtype]).all())
        buffer.check()


def _assert_fp8(received: Any, expected: list[Tensor], what: str) -> None:
    for tensor, wanted, kind in zip(received, expected, ("rows", "scales"), strict=True):
        assert_same_bits(tensor, wanted, f"{kind}, {what}")


@pytest.mark.parametrize(
    ("hidden", "num_scales", "scale_dtype"),
    [(7168, 56, torch.float32), (7168, 14, torch.int32), (2048, 16, torch.float32), (272, 3, torch.float32)]
    + [(16, 1, torch.int32), (100, 1, torch.float32)],
)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_fp8_rows_and_scales_of_any_width_arrive_as_they_were_sent(
    ranks: Pools, world: int, hidden: int, num_scales: int, scale_dtype: torch.dtype
) -> None:
    ranks.run(_fp8_rows, world, hidden, num_scales, scale_dtype)


class _Recorder:
    """Stands before an exchange and notes the SMs of every launch."""

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange
        self.num_sms: list[int] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._exchange, name)
        if not callable(value):
            return value

        def launch(*args: Any, **arguments: Any) -> Any:
            if name in ("plan", "plan_fill", "move", "combine", "numbers_home", "all_reduce"):
                self.num_sms.append(args[2])  # behind the caller's stream and whether it joins
            return value(*args, **arguments)

        return launch


def _budget(group: dist.ProcessGroup) -> None:
    """The budget of the buffer, of the class and of a Config reaches every launch of a call; results do not change."""
    case = Routed(group, BACKEND)
    with deep_ep.Buffer(group, backend=BACKEND, timeout_secs=20, num_sms=3) as buffer:
        recorder = _Recorder(buffer.backend._exchange)  # type: ignore[attr-defined]
        buffer.backend._exchange = recorder  # type: ignore[attr-defined]
        layout = _layout_of(case, buffer)
        seen = []
        for config in (None, deep_ep.Config(1), deep_ep.Config(num_sms=7), deep_ep.Config(16, 8, 512)):
            for topk in ({}, {"topk_idx": case.topk_idx, "topk_weights": case.weights}):
                recorder.num_sms.clear()
                recv, _, weights, _, handle, _ = buffer.dispatch(case.x, **layout, **topk, config=config)
                assert handle is not None
                assert isinstance(recv, Tensor)
                buffer.dispatch(case.x, handle=handle, config=config)
                y, summed, _ = buffer.combine(recv, handle, topk_weights=weights, config=config)
                assert len(recorder.num_sms) >= 5  # plan, rows; rows; sums
                assert set(recorder.num_sms) == {3 if config is None else config.num_sms}
                if topk:
                    assert summed is not None
                    seen.append((recv, y, summed))
        for results in seen[1:]:
            for ours, first in zip(results, seen[0], strict=True):
                assert_same_bits(ours, first, "with another budget")
        assert buffer.backend.num_sms == 3


@pytest.mark.parametrize("world", [1, 2])
def test_the_sm_budget_reaches_every_launch_and_changes_no_bit(ranks: Pools, world: int) -> None:
    ranks.run(_budget, world)


def _summed_weights(group: dist.ProcessGroup) -> None:
    """Weights come home summed over the ranks in rank order, in float32; slots without an expert hold 0."""
    case = Routed(group, BACKEND)
    with deep_ep.Buffer(group, backend=BACKEND, timeout_secs=20) as buffer:
        layout = _layout_of(case, buffer)
        recv, _, weights, _, handle, _ = buffer.dispatch(
            case.x, **layout, topk_idx=case.topk_idx, topk_weights=case.weights
        )
        assert handle is not None
        assert isinstance(recv, Tensor)
        assert weights is not None
        summed = buffer.combine(recv, handle, topk_weights=weights)[1]
        assert summed is not None
        assert_same_bits(summed, case.weights * (case.topk_idx >= 0), "weights that nobody changed")
        ones = torch.full_like(weights, float(case.rank + 1))
        summed = buffer.combine(recv, handle, topk_weights=ones)[1]
        assert summed is not None
        per_token = [sum(rank + 1 for rank in ranks) for ranks in case.ranks_of(case.topk_idx)]
        expected = torch.tensor(per_token, dtype=torch.float32).unsqueeze(1).expand(summed.shape)
        assert_same_bits(summed, expected, "a number of each rank")


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_combine_sums_the_weights_over_the_ranks(ranks: Pools, world: int) -> None:  # A8
    ranks.run(_summed_weights, world)
