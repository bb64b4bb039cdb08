"""Low-latency calls on the kernels against the loops, one rank's side: what the tests of this folder share.

Only the places that hold a row are compared: the kernels write no others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.fp8 import dequantize_1x128, quantize_1x128
from moe_ep.reference import LoopRow, combine_loop, dispatch_loop
from tests.distributed.conformance import owner_table
from tests.distributed.test_low_latency import (
    Expected,
    Inputs,
    Options,
    dequantized,
    expected_places,
    expert_results,
    least_max_tokens,
    unpack_scales,
)
from tests.helpers.compare import assert_same_bits
from tests.helpers.routing import make_inputs

SETTINGS: dict[str, Any] = {"backend": "intranode"}  # of the buffers; those between nodes have others
LIMIT_SECS = 20.0
# SMs that a GPU is taken to have, 0 for all. Test files that run beside each other on a GPU need it: a grid has to find
# room as a whole, so together they must stay below what there is.
NUM_JOBS = int(os.environ.get("GPU_JOBS", "1"))
NUM_SMS = 0 if NUM_JOBS == 1 else 128 // NUM_JOBS


class FewerSms:
    """The kernels on a GPU that has only `NUM_SMS`."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def num_sms(self) -> int:
        return NUM_SMS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def open_buffer(group: dist.ProcessGroup, **arguments: Any) -> moe_ep.Buffer:
    buffer = moe_ep.Buffer(group, **{"timeout_secs": LIMIT_SECS, **SETTINGS, **arguments})
    if NUM_SMS:
        memory: Any = buffer.backend.low_latency._memory  # type: ignore[union-attr]
        memory._kernels = FewerSms(memory._kernels)
    return buffer


@dataclass
class Scene:
    """The inputs of all ranks, and what this one must get."""

    world: int
    rank: int
    inputs: Inputs
    owner: list[int]
    num_max: int
    kept: list[Tensor] = field(default_factory=list)  # the ids that count for this rank; all of them if empty

    @property
    def num_experts(self) -> int:
        return len(self.owner)

    @property
    def rows(self) -> list[list[LoopRow]]:
        return dispatch_loop(self.kept or [i for _, i, _ in self.inputs], [w for _, _, w in self.inputs], self.owner)

    @property
    def expected(self) -> Expected:
        return expected_places(self.rows[self.rank], self.owner.count(self.rank), self.world, self.num_max)

    @property
    def own(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, topk_idx and topk_weights of this rank on its GPU."""
        x, idx, weights = self.inputs[self.rank]
        return x.cuda(), idx.cuda(), weights.cuda()

    def dispatch(self, buffer: moe_ep.Buffer, option: Options, **more: Any) -> Any:
        x, idx, _ = self.own
        fp8 = {"use_fp8": option.use_fp8, "round_scale": option.round_scale, "use_ue8m0": option.use_ue8m0}
        return buffer.low_latency_dispatch(
            x, idx, self.num_max, self.num_experts, return_recv_hook=option.hook, **fp8, **more
        )

    def check_dispatch(self, result: Any, option: Options) -> Tensor:
        """Rows, scales, counts and the handle; returns the rows as they go into the experts."""
        received, count, handle, _, _ = result
        expected, x = self.expected, [x for x, _, _ in self.inputs]
        assert_same_bits(count, expected.recv_count, "recv_count")
        assert_same_bits(handle.src_info, expected.src_info, "src_info")
        assert_same_bits(handle.layout_range, expected.layout_range, "layout_range")
        assert [*handle][2:] == [self.num_max, x[0].shape[1], self.num_experts]
        recv, scales = received if option.use_fp8 else (received, None)
        assert recv.shape == (*expected.src_info.shape, x[0].shape[1])
        picked = picked_rows(x, expected)
        if scales is None:
            assert_same_bits(at_places(recv, expected), picked, "recv")
            return recv.cpu()  # type: ignore[no-any-return]
        codes, wide = quantize_1x128(picked, power_of_two=option.round_scale)
        assert_same_bits(at_places(recv.view(torch.uint8), expected), codes.view(torch.uint8), "FP8 recv")
        assert scales.transpose(1, 2).is_contiguous()
        assert_same_bits(unpack_scales(at_places(scales, expected)), wide, "scales")
        filled = torch.full(recv.shape, float("nan"), dtype=torch.bfloat16)
        return put_rows(filled, dequantize_1x128(codes, wide), expected)

    def made(self, seed: int) -> list[Tensor]:
        """[R, H] of every rank, as if its experts had made them."""
        x = self.inputs[0][0]
        return expert_results(self.rows, x.shape[1], x.dtype, seed)

    def combine(self, buffer: moe_ep.Buffer, handle: Any, made: list[Tensor], **more: Any) -> Any:
        _, idx, weights = self.own
        shape = (*self.expected.src_info.shape, made[0].shape[1])
        filled = put_rows(torch.full(shape, float("nan"), dtype=made[0].dtype), made[self.rank], self.expected).cuda()
        return buffer.low_latency_combine(filled, idx, weights, handle, **more)

    def check_combine(self, y: Tensor, made: list[Tensor], what: str = "combined") -> None:
        home = combine_loop(made, self.rows, [len(i) for _, i, _ in self.inputs], weighted=True, exact=True)
        assert_same_bits(y, home[self.rank], what)

    def round_trip(self, buffer: moe_ep.Buffer, option: Options = Options(), seed: int = 1) -> None:  # noqa: B008
        result = self.dispatch(buffer, option)
        if option.hook:
            result[-1]()
        self.check_dispatch(result, option)
        if option.use_fp8:
            x = [x for x, _, _ in self.inputs]
            made = [dequantized(x, option, of) if of else x[0][:0] for of in self.rows]
        else:
            made = self.made(seed)
        y, _, hook = self.combine(buffer, result[2], made, return_recv_hook=option.hook)
        if option.hook:
            hook()
        self.check_combine(y, made)


def scene_of(
    group: dist.ProcessGroup,
    routing: str = "random",
    tokens: str = "ragged",
    hidden: int = 64,
    num_topk: int = 3,
    owner: list[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Scene:
    world = dist.get_world_size(group)
    owner = owner_table(2 * world + 1, world) if owner is None else owner
    inputs = make_inputs(routing, tokens, world, hidden, num_topk, len(owner), dtype, seed)
    return Scene(world, dist.get_rank(group), inputs, owner, least_max_tokens(inputs))


def picked_rows(x: list[Tensor], expected: Expected) -> Tensor:
    """[R, H], the rows that a rank receives, in order."""
    rows = [x[rank][token] for rank, token in expected.sources.values()]
    return torch.stack(rows) if rows else x[0][:0]


def at_places(out: Tensor, expected: Expected) -> Tensor:
    """[R, ...], what lies in the places that hold a row."""
    places = torch.tensor(list(expected.sources), dtype=torch.int64).reshape(-1, 2)
    return out.cpu()[places[:, 0], places[:, 1]]


def put_rows(out: Tensor, rows: Tensor, expected: Expected) -> Tensor:
    for row, place in zip(rows, expected.sources, strict=True):
        out[place] = row
    return out
