"""Random shapes and routings inside a node, two layers in flight on two buffers, bit for bit against the torch backend.

The reference runs the same calls over gloo on CPU copies. Before every call the memory that is free holds NaN.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from tests.helpers.compare import assert_close, assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.routing import ROUTINGS
from tests.helpers.scale_experts import open_buffer

pytestmark = pytest.mark.gpu
HIDDEN = (8, 64, 520, 1024, 2056, 5, 257)  # the last two: rows that are no multiple of 16 bytes
TOKENS = (0, 1, 3, 17, 64, 200, 700)
NUM_ELEMENTS = 200_000  # of expert-major rows that a rank may send
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Shape:
    """One layer's call, the same on all ranks but for the number of tokens."""

    seed: int
    tokens: tuple[int, ...]
    hidden: int
    num_topk: int
    num_experts: int
    routing: str
    layout: str
    alignment: int
    dtype: torch.dtype
    idx_dtype: torch.dtype
    exact: bool


def draw(seed: int, world: int) -> Shape:
    g = random.Random(seed)
    hidden, num_topk = g.choice(HIDDEN), g.choice((1, 2, 3, 8, 8, 33, 64))
    most = max(1, NUM_ELEMENTS // (hidden * num_topk))
    layout = g.choice(("compact", "expert_major"))
    return Shape(
        seed=seed,
        tokens=tuple(min(most, g.choice(TOKENS)) for _ in range(world)),
        hidden=hidden,
        num_topk=num_topk,
        num_experts=g.choice((1, 3, world, 2 * world + 1, 8, 13, 37)),
        routing=g.choice(tuple(ROUTINGS)),
        layout=layout,
        alignment=g.choice((1, 8, 16)),
        dtype=g.choice(DTYPES),
        idx_dtype=g.choice((torch.int64, torch.int32)),
        exact=layout == "expert_major" and g.random() < 0.25,
    )


def leave_nans_behind() -> None:
    """What the allocator hands out next holds NaN, whatever its size."""
    blocks = [torch.full((4 << size,), math.nan, device="cuda") for size in range(20) for _ in range(2)]
    blocks.clear()


class Layer:
    """Forward and backward of one exchange, with experts that multiply by 1.5."""

    def __init__(self, buffer: moe_ep.Buffer, shape: Shape, device: str) -> None:
        self.buffer, self.shape, self.device = buffer, shape, device
        g = torch.Generator().manual_seed(1000 * shape.seed + buffer.rank)
        num_tokens = shape.tokens[buffer.rank]
        wide = torch.float64 if shape.dtype == torch.float64 else torch.float32
        self.x = torch.randn(num_tokens, shape.hidden, generator=g).to(device, shape.dtype).requires_grad_()
        ids = ROUTINGS[shape.routing](num_tokens, shape.num_topk, shape.num_experts, g)
        self.idx = ids.to(device, shape.idx_dtype)
        self.weights = torch.rand(num_tokens, shape.num_topk, generator=g).to(device, wide).requires_grad_()
        self.dy = torch.randn(num_tokens, shape.hidden, generator=g).to(device, shape.dtype)

    def dirty(self) -> None:
        if self.device == "cuda":
            leave_nans_behind()

    def forward(self) -> None:
        self.dirty()
        self.out = moe_ep.dispatch(
            self.buffer,
            self.x,
            self.idx,
            self.weights,
            num_experts=self.shape.num_experts,
            layout=self.shape.layout,
            alignment=self.shape.alignment,
        )
        self.dirty()
        weights = self.out.topk_weights if self.shape.layout == "expert_major" else None
        self.y = moe_ep.combine(self.buffer, self.out.x * 1.5, self.out.handle, weights, exact=self.shape.exact)

    def backward(self) -> dict[str, Tensor]:
        """Everything that the exchange gave. The weights' gradient has a part of their own in compact."""
        self.dirty()
        assert self.out.topk_weights is not None
        ours = torch.linspace(0.5, 1.5, self.out.topk_weights.numel(), dtype=torch.float64)
        grad = ours.to(self.device, self.out.topk_weights.dtype).view(self.out.topk_weights.shape)
        dx, dw = torch.autograd.grad([self.y, self.out.topk_weights], [self.x, self.weights], [self.dy, grad])
        return {
            "rows": self.out.x.detach(),
            "ids": self.out.topk_idx,
            "weights": self.out.topk_weights.detach(),
            "counts": self.out.expert_counts,
            "offsets": self.out.expert_offsets,
            "y": self.y.detach(),
            "dx": dx,
            "dw": dw,
        }


def _compare(ours: dict[str, Tensor], expected: dict[str, Tensor], what: str, exactly: bool) -> None:
    for name, tensor in expected.items():
        if name == "dw" and not exactly:
            assert_close(ours[name], tensor, 1e-5, f"{name}, {what}")
        else:
            assert_same_bits(ours[name], tensor, f"{name}, {what}")


def _iterations(group: dist.ProcessGroup, first_seed: int, num_iterations: int) -> int:
    world = dist.get_world_size(group)
    with (
        open_buffer(group, "intranode") as a,
        open_buffer(group, "intranode") as b,
        open_buffer(group, "torch") as reference,
    ):
        for seed in range(first_seed, first_seed + num_iterations):
            shapes = [draw(2 * seed, world), draw(2 * seed + 1, world)]
            expected = []
            for shape in shapes:
                layer = Layer(reference, shape, "cpu")
                layer.forward()
                expected.append(layer.backward())
            runs = []
            for _ in range(2 if seed % 10 == 0 else 1):
                layers = [Layer(buffer, shape, "cuda") for buffer, shape in zip((a, b), shapes, strict=True)]
                for layer in layers:
                    layer.forward()
                runs.append([layer.backward() for layer in layers])
            for ours, theirs, shape in zip(runs[0], expected, shapes, strict=True):
                _compare(ours, theirs, f"{shape}", exactly=False)
            for again, ours, shape in zip(runs[-1], runs[0], shapes, strict=True):
                _compare(again, ours, f"a second run of {shape}", exactly=True)
            for buffer in (a, b):
                buffer.check()
    return num_iterations


@pytest.mark.parametrize(("world", "num_iterations"), [(1, 60), (2, 200), (4, 60), (8, 20)])
def test_two_layers_in_flight_have_the_bits_of_the_torch_backend(
    ranks: Pools, world: int, num_iterations: int
) -> None:  # cases E05, I07
    results = ranks.run(_iterations, world, 10_000 * world, num_iterations, timeout_secs=110)
    assert results == [num_iterations] * world


def _foreign_handle(group: dist.ProcessGroup) -> None:
    """A handle that the torch backend made on the CPU, used by the kernels."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    with open_buffer(group, "torch") as maker, open_buffer(group, "intranode") as buffer:
        for seed, (routing, layout) in enumerate(itertools.product(ROUTINGS, ("compact", "expert_major"))):
            shape = replace(draw(seed, world), routing=routing, layout=layout, hidden=64, num_topk=3, exact=False)
            theirs, ours = Layer(maker, shape, "cpu"), Layer(buffer, shape, "cuda")
            theirs.forward()
            handle = theirs.out.handle
            assert isinstance(handle, moe_ep.DispatchHandle)
            names = ("slot_rank", "send_token", "recv_token", "row_pair", "geometry", "token_row", "pair_row")
            moved = replace(handle, **{name: getattr(handle, name).cuda() for name in names})
            leave_nans_behind()
            rows = buffer.backend.dispatch(moved, ours.x.detach())
            assert_same_bits(rows, theirs.out.x, f"rows, {shape}")
            made = (rows * 1.5).requires_grad_()
            theirs_made = (theirs.out.x.detach() * 1.5).requires_grad_()
            weights = theirs.out.topk_weights if layout == "expert_major" else None
            y = moe_ep.combine(buffer, made, moved, None if weights is None else weights.detach().cuda())
            expected = moe_ep.combine(maker, theirs_made, handle, None if weights is None else weights.detach())
            assert_same_bits(y, expected, f"y, {shape}")
            y.backward(ours.dy)
            expected.backward(theirs.dy)
            assert made.grad is not None
            assert theirs_made.grad is not None
            assert_same_bits(made.grad, theirs_made.grad, f"d_rows on rank {rank}, {shape}")
            buffer.check()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_handle_of_the_torch_backend_serves_the_kernels(ranks: Pools, world: int) -> None:
    ranks.run(_foreign_handle, world)
