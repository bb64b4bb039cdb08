"""The contract of DESIGN section 2 as checks that one rank runs; any backend is one name away.

Each check builds the inputs of all ranks from the seed, so it can work out on its own, by the loops of
`moe_ep.reference`, what this rank must get.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.reference import LoopRow, combine_loop, dispatch_loop, rows_of
from tests.helpers.compare import assert_close, assert_same_bits
from tests.helpers.routing import ROUTINGS, TOKEN_COUNTS, make_inputs

HIDDEN = 8  # rows of 16 bytes in bfloat16, the least that every backend takes
NUM_TOPK = 3


def owner_table(num_experts: int, world: int) -> list[int]:
    """The balanced contiguous split, written as a loop."""
    owner: list[int] = []
    for rank in range(world):
        owner += [rank] * (num_experts // world + (1 if rank < num_experts % world else 0))
    return owner


def _payload(rows: list[list[LoopRow]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Random rows for every rank, as if the experts had made them; zero in padding."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for received in rows:
        values = torch.randn(len(received), HIDDEN, generator=g, dtype=torch.float64).to(dtype)
        for i, row in enumerate(received):
            if row.source is None:
                values[i] = 0
        made.append(values)
    return made


Inputs = list[tuple[Tensor, Tensor, Tensor]]  # (x [T, H], topk_idx [T, K], topk_weights [T, K]) of every rank


def check_routing(
    group: dist.ProcessGroup,
    backend: str,
    layout: str,
    dtype: torch.dtype,
    routing: str,
    tokens: str,
    alignment: int,
    idx_dtype: torch.dtype = torch.int64,
    exact: bool = False,
    device: str = "cpu",
    ranks_per_node: int | None = None,
    hop: str = "auto",
) -> None:
    """`check_round_trip` for a named routing, with one expert more than two a rank."""
    world = dist.get_world_size(group)
    num_experts = 2 * world + 1
    inputs = make_inputs(routing, tokens, world, HIDDEN, NUM_TOPK, num_experts, dtype)
    check_round_trip(
        group, backend, layout, inputs, num_experts, alignment, idx_dtype, exact, device, ranks_per_node, hop
    )


def check_every_routing(
    group: dist.ProcessGroup,
    layout: str,
    dtype: torch.dtype,
    ranks_per_node: int,
    hop: str,
    exact: bool,
    device: str = "cpu",
) -> int:
    """`check_routing` of backend "internode" for every named routing and count of tokens; how many there were."""
    names = list(itertools.product(ROUTINGS, TOKEN_COUNTS))
    for routing, tokens in names:
        check_routing(
            group, "internode", layout, dtype, routing, tokens, 4, torch.int64, exact, device, ranks_per_node, hop
        )
    return len(names)


def check_round_trip(
    group: dist.ProcessGroup,
    backend: str,
    layout: str,
    inputs: Inputs,
    num_experts: int,
    alignment: int,
    idx_dtype: torch.dtype = torch.int64,
    exact: bool = False,
    device: str = "cpu",
    ranks_per_node: int | None = None,
    hop: str = "auto",
) -> None:
    """Forward bits, counts and order; combine bits; dx bits; dw against float64. The oracle runs on the CPU.

    With `ranks_per_node` the ranks of a node add up theirs first.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    owner = owner_table(num_experts, world)
    dtype = inputs[0][0].dtype
    expected = dispatch_loop([i for _, i, _ in inputs], [w for _, _, w in inputs], owner, layout, alignment)
    x, idx, weights = (t.to(device, copy=True) for t in inputs[rank])
    x.requires_grad_()
    weights.requires_grad_()
    nodes = ranks_per_node or 1
    with moe_ep.Buffer(group, backend=backend, timeout_secs=20, ranks_per_node=ranks_per_node, hop=hop) as buffer:
        out = moe_ep.dispatch(
            buffer, x, idx.to(idx_dtype), weights, num_experts=num_experts, layout=layout, alignment=alignment
        )
        _check_received(out, expected[rank], [i for i, _, _ in inputs], owner.count(rank), layout, alignment)
        assert out.topk_idx.dtype == idx_dtype

        weighted = layout == "expert_major"
        made = _payload(expected, dtype, seed=1)
        rows = made[rank].to(device, copy=True).requires_grad_()
        row_weights = out.topk_weights.detach().clone().requires_grad_() if weighted else None
        y = moe_ep.combine(buffer, rows, out.handle, row_weights, exact=exact)
        home = combine_loop(made, expected, [len(i) for _, i, _ in inputs], weighted, exact, nodes)
        assert_same_bits(y, home[rank], "y")

        _check_combine_gradient(y, rows, row_weights, expected, inputs, rank)
        _check_dispatch_gradient(out, x, weights, expected, inputs, rank, layout, nodes)


def _check_received(
    out: moe_ep.DispatchOutput, expected: list[LoopRow], x: list[Tensor], num_local: int, layout: str, alignment: int
) -> None:
    assert_same_bits(out.x, rows_of(expected, x), "received rows")
    ids = [list(row.ids) for row in expected] if layout == "compact" else [row.ids[0] for row in expected]
    weights = [list(row.weights) for row in expected] if layout == "compact" else [row.weights[0] for row in expected]
    num_topk = out.handle.num_topk
    shape = (len(expected), num_topk) if layout == "compact" else (len(expected),)
    assert out.topk_idx.tolist() == ids
    assert tuple(out.topk_idx.shape) == shape
    assert out.topk_weights is not None
    expected_weights = torch.tensor(weights, dtype=torch.float64).reshape(shape)
    assert_same_bits(out.topk_weights, expected_weights.to(out.topk_weights.dtype), "received weights")
    flat = [i for row in expected for i in row.ids if i >= 0]
    real = [flat.count(local) for local in range(num_local)]
    padded = [-(-count // alignment) * alignment for count in real]
    assert out.real_tokens_per_expert == real
    assert out.tokens_per_expert == padded
    assert out.expert_counts.tolist() == real
    assert out.expert_counts.dtype == torch.int32
    assert out.expert_offsets.tolist() == [sum(padded[:i]) for i in range(num_local + 1)]


def _check_combine_gradient(
    y: Tensor,
    rows: Tensor,
    row_weights: Tensor | None,
    expected: list[list[LoopRow]],
    inputs: list[tuple[Tensor, Tensor, Tensor]],
    rank: int,
) -> None:
    """d_rows = round(weight * dy[source]), d_weight = <dy[source], row>; dy differs on every rank."""
    g = torch.Generator().manual_seed(2)
    grads = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for x, _, _ in inputs]
    y.backward(grads[rank].to(y.device))
    arrived = rows_of(expected[rank], grads)
    assert rows.grad is not None
    if row_weights is None:
        assert_same_bits(rows.grad, arrived, "d_rows")
        return
    wide = row_weights.dtype
    weights = torch.tensor([row.weights[0] for row in expected[rank]], dtype=wide).unsqueeze(1)
    assert_same_bits(rows.grad, (arrived.to(wide) * weights).to(rows.dtype), "d_rows")
    assert row_weights.grad is not None
    assert row_weights.grad.dtype == wide
    products = (arrived.double() * rows.detach().cpu().double()).sum(1)
    assert_close(row_weights.grad, products, 1e-5, "d_weights of the rows")


def _check_dispatch_gradient(
    out: moe_ep.DispatchOutput,
    x: Tensor,
    weights: Tensor,
    expected: list[list[LoopRow]],
    inputs: list[tuple[Tensor, Tensor, Tensor]],
    rank: int,
    layout: str,
    ranks_per_node: int,
) -> None:
    """dx is an unweighted combine, bit for bit; dw comes back to its slot unchanged."""
    grad_rows = _payload(expected, x.dtype, seed=3)
    g = torch.Generator().manual_seed(4)
    assert out.topk_weights is not None
    grad_weights = [
        torch.randn(
            (len(rows), weights.shape[1]) if layout == "compact" else (len(rows),), generator=g, dtype=torch.float64
        )
        for rows in expected
    ]
    arriving = [grad_rows[rank].to(x.device), grad_weights[rank].to(x.device, weights.dtype)]
    torch.autograd.backward([out.x, out.topk_weights], arriving)
    num_tokens = [len(i) for _, i, _ in inputs]
    home = combine_loop(grad_rows, expected, num_tokens, weighted=False, ranks_per_node=ranks_per_node)
    assert x.grad is not None
    assert_same_bits(x.grad, home[rank], "dx")
    dw = torch.zeros(weights.shape, dtype=torch.float64)
    for peer, received in enumerate(expected):
        for i, row in enumerate(received):
            if row.source is not None and row.source[0] == rank:
                for slot in row.slots:
                    dw[row.source[1], slot] = (
                        grad_weights[peer][i, slot] if layout == "compact" else grad_weights[peer][i]
                    )
    assert weights.grad is not None
    assert_same_bits(weights.grad, dw.to(weights.dtype), "dw")
