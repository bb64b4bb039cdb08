"""The custom ops: schema, fakes and autograd, as torch.library's own checker sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ep
from moe_ep.autograd import ops

IDX = torch.tensor([[0, 2], [1, -1], [3, 3], [-1, -1]])


def _dispatch_args(buffer: moe_ep.Buffer, layout: str, max_rows: int | None = None) -> tuple[Any, ...]:
    x = torch.randn(4, 8, requires_grad=True)
    weights = torch.rand(4, 2, requires_grad=True)
    return (x, IDX, weights, buffer.anchor, buffer.key, 4, layout, 2, max_rows, True, True, True)


@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("max_rows", [None, 12])
def test_opcheck_dispatch(layout: str, max_rows: int | None) -> None:
    with moe_ep.Buffer() as buffer:
        torch.library.opcheck(ops.dispatch_op, _dispatch_args(buffer, layout, max_rows))


@pytest.mark.parametrize(("layout", "weighted"), [("compact", False), ("expert_major", False), ("expert_major", True)])
def test_opcheck_combine_and_the_two_backwards(layout: str, weighted: bool) -> None:
    with moe_ep.Buffer() as buffer, torch.no_grad():
        rows, _, weights, _, _, *handle = ops.dispatch_op(*_dispatch_args(buffer, layout))
        grad_y = torch.randn(4, 8)
        used = weights if weighted else None
        torch.library.opcheck(ops.dispatch_backward_op, (rows, weights, handle, buffer.key))
        torch.library.opcheck(
            ops.combine_backward_op, (grad_y, rows if weighted else None, used, handle, buffer.key, rows.shape[0])
        )
        leaf = rows.clone().requires_grad_()
        leaf_weights = weights.clone().requires_grad_() if weighted else None
    with moe_ep.Buffer() as buffer:
        torch.library.opcheck(ops.combine_op, (leaf, leaf_weights, buffer.anchor, handle, buffer.key, False, True))


def test_opcheck_all_reduce() -> None:
    with moe_ep.Buffer() as buffer:
        torch.library.opcheck(ops.all_reduce_op, (torch.arange(3), buffer.key))


def test_a_compiled_exchange_has_the_bits_of_the_eager_one() -> None:
    with moe_ep.Buffer() as buffer:

        def exchange(x: Tensor, weights: Tensor) -> Tensor:
            out = moe_ep.dispatch(buffer, x, IDX, weights, num_experts=4)
            return moe_ep.combine(buffer, torch.tanh(out.x), out.handle, out.topk_weights)

        results = []
        for function in (exchange, torch.compile(exchange, backend="aot_eager", fullgraph=True)):
            torch.manual_seed(1)
            x = torch.randn(4, 8, requires_grad=True)
            weights = torch.rand(4, 2, requires_grad=True)
            y = function(x, weights)
            y.square().sum().backward()
            results.append((y.detach(), x.grad, weights.grad))
        for eager, compiled in zip(*results, strict=True):
            assert torch.equal(eager, compiled)


def test_an_op_whose_buffer_is_gone_says_so() -> None:
    args = _dispatch_args(moe_ep.Buffer(), "compact")
    with pytest.raises(RuntimeError, match="the buffer with key .* is gone"):
        ops.dispatch_op(*args)
