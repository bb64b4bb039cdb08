"""Dispatch and combine in plain numbers: 4 tokens, 4 experts, top-2.

    python examples/dispatch_combine_walkthrough.py                                     # one rank holds everything
    torchrun --standalone --nproc-per-node 2 examples/dispatch_combine_walkthrough.py   # two tokens, two experts a rank

Token t is the row (t+1, 10(t+1)); expert e multiplies a row by e+1. So every number below can be checked by hand. The
exit code is 1 if a count or a number is not what it must be.

Letters: T tokens of a rank, N tokens of all ranks, H = 2 hidden, E = 4 experts, K = 2 experts a token, W ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.reference import dense_moe

NUM_EXPERTS, TOPK = 4, 2
TOPK_IDX = torch.tensor([[0, 2], [2, 3], [0, 1], [3, 0]])
TOPK_WEIGHTS = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0.875, 0.125]])
NUM_TOKENS = len(TOPK_IDX)
X_NH = torch.tensor([[1.0, 10.0]]) * torch.arange(1.0, NUM_TOKENS + 1)[:, None]


@dataclass
class Ranks:
    """This process among all, what it says, and what it found wrong."""

    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None
    failures: list[str] = field(default_factory=list)

    @classmethod
    def start(cls) -> Ranks:
        """All ranks that torchrun started, or one that was started alone."""
        if "WORLD_SIZE" not in os.environ:
            return cls(0, 1, None)
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        return cls(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)

    def say(self, *lines: str) -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print("\n".join(lines), flush=True)

    def say_all(self, header: str, lines: list[str]) -> None:
        """Prints the lines of every rank, in rank order, on rank 0."""
        gathered: list[list[str]] = [lines]
        if self.group is not None:
            gathered = [[] for _ in range(self.num_ranks)]
            dist.all_gather_object(gathered, lines, group=self.group)
        self.say(header, *(line for part in gathered for line in part))

    def total(self, number: int) -> int:
        """The sum of `number` over all ranks."""
        count = torch.tensor(number)
        if self.group is not None:
            dist.all_reduce(count, group=self.group)
        return int(count)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Notes a failure."""
        if not holds:
            self.failures.append(otherwise)
            print(f"WRONG on rank {self.rank}: {otherwise}", file=sys.stderr, flush=True)


def main() -> int:
    """Walks through the two primitives; 1 if an equality fails, 2 if the number of ranks does not fit."""
    ranks = Ranks.start()
    if NUM_TOKENS % ranks.num_ranks:
        print(
            f"{NUM_TOKENS} tokens do not split evenly over {ranks.num_ranks} ranks; start 1, 2 or 4.", file=sys.stderr
        )
        return 2
    size = NUM_TOKENS // ranks.num_ranks
    mine = slice(ranks.rank * size, (ranks.rank + 1) * size)
    x_TH = X_NH[mine].clone().requires_grad_()
    weights_TK = TOPK_WEIGHTS[mine].clone().requires_grad_()
    with moe_ep.Buffer(ranks.group, timeout_secs=30) as buffer:
        tell_routing(ranks, buffer)
        out = tell_dispatch(ranks, buffer, x_TH, TOPK_IDX[mine], weights_TK)
        tell_compact(ranks, buffer, x_TH, TOPK_IDX[mine])
        y_TH = run_experts_and_combine(ranks, buffer, out)
        y_TH.sum().backward()
    tell_result(ranks, mine, y_TH, x_TH, weights_TK)
    failed = ranks.total(len(ranks.failures))
    ranks.say("", "FAILED" if failed else "Every row arrived, and y and both gradients equal the dense result.")
    if ranks.group is not None:
        dist.destroy_process_group()
    return 1 if failed else 0


def tell_routing(ranks: Ranks, buffer: moe_ep.Buffer) -> None:
    """Who goes where."""
    owner = buffer.placement(NUM_EXPERTS).owner
    size = NUM_TOKENS // ranks.num_ranks
    ranks.say(
        f"1. What the router said: {NUM_TOKENS} tokens, {NUM_EXPERTS} experts, top-{TOPK}, {ranks.num_ranks} rank(s).",
        "",
    )
    ranks.say("   token  lives on  row      goes to (weight)")
    for token in range(NUM_TOKENS):
        choices = zip(TOPK_IDX[token].tolist(), TOPK_WEIGHTS[token].tolist(), strict=True)
        targets = ", ".join(f"expert {expert} on rank {owner[expert]} ({weight:g})" for expert, weight in choices)
        ranks.say(f"   {token:>5}  rank {token // size}    {show(X_NH[token]):<7}  {targets}")


def tell_dispatch(
    ranks: Ranks, buffer: moe_ep.Buffer, x_TH: Tensor, topk_idx_TK: Tensor, weights_TK: Tensor
) -> moe_ep.DispatchOutput:
    """Every token travels to its experts; no row is lost and none is made up."""
    out = moe_ep.dispatch(buffer, x_TH, topk_idx_TK, weights_TK, num_experts=NUM_EXPERTS, layout="expert_major")
    assert out.topk_weights is not None
    experts = buffer.placement(NUM_EXPERTS).experts_of(ranks.rank)
    lines = []
    for row, (values, local, weight) in enumerate(zip(out.x, out.topk_idx.tolist(), out.topk_weights, strict=True)):
        token = int(values[0]) - 1
        lines.append(f"   {ranks.rank:>4}  {row:>3}  {experts[local]:>6}  {token:>5}  {show(values):<7}  {weight:g}")
    ranks.say(
        "", "2. dispatch: every token travels to its experts. Rows lie expert by expert (expert_major), inside an"
    )
    ranks.say("   expert by source rank, then by source token. The weight travels beside its row.", "")
    ranks.say_all("   rank  row  expert  token  values   weight", lines)
    num_rows = ranks.total(out.x.shape[0])
    ranks.say(
        "", f"   Conservation: {num_rows} rows on all ranks, N * K = {NUM_TOKENS} * {TOPK} = {NUM_TOKENS * TOPK}."
    )
    ranks.expect(num_rows == NUM_TOKENS * TOPK, f"{num_rows} rows were received, not N * K = {NUM_TOKENS * TOPK}")
    return out


def tell_compact(ranks: Ranks, buffer: moe_ep.Buffer, x_TH: Tensor, topk_idx_TK: Tensor) -> None:
    """A token with two experts on one rank travels there once."""
    owner = buffer.placement(NUM_EXPERTS).owner
    num_rows = ranks.total(
        moe_ep.dispatch(buffer, x_TH, topk_idx_TK, num_experts=NUM_EXPERTS, layout="compact").x.shape[0]
    )
    pairs = {(token, owner[expert]) for token, named in enumerate(TOPK_IDX.tolist()) for expert in named}
    ranks.say(f"   What travels is one row per (token, rank), the compact layout: {num_rows} rows.")
    ranks.expect(num_rows == len(pairs), f"{num_rows} compact rows were received, not {len(pairs)}")


def run_experts_and_combine(ranks: Ranks, buffer: moe_ep.Buffer, out: moe_ep.DispatchOutput) -> Tensor:
    """Expert e multiplies its rows by e + 1; then they travel home and are added with their weights."""
    assert out.tokens_per_expert is not None
    experts = buffer.placement(NUM_EXPERTS).experts_of(ranks.rank)
    parts = out.x.split_with_sizes(out.tokens_per_expert)
    rows_RH = torch.cat([part * (expert + 1) for part, expert in zip(parts, experts, strict=True)])
    return moe_ep.combine(buffer, rows_RH, out.handle, out.topk_weights)


def tell_result(ranks: Ranks, mine: slice, y_TH: Tensor, x_TH: Tensor, weights_TK: Tensor) -> None:
    """What came home, beside the same computed without any travel: every expert sees every token."""
    x_NH, weights_NK = X_NH.clone().requires_grad_(), TOPK_WEIGHTS.clone().requires_grad_()
    dense_NH = dense_moe(x_NH, TOPK_IDX, weights_NK, [multiply_by(expert + 1) for expert in range(NUM_EXPERTS)])
    dense_NH.sum().backward()
    assert x_TH.grad is not None
    assert weights_TK.grad is not None
    assert x_NH.grad is not None
    assert weights_NK.grad is not None
    lines = []
    for place, token in enumerate(range(NUM_TOKENS)[mine]):
        results = f"{show(y_TH[place]):<14}  {show(dense_NH[token]):<14}"
        lines.append(f"   {token:>5}  {results}  {show(x_TH.grad[place]):<14}  {show(weights_TK.grad[place])}")
    ranks.say(
        "", "3. Expert e multiplies its rows by e+1; combine brings them home and adds them with their weights. The"
    )
    ranks.say(
        "   gradients (of the sum of y) go the same way: the backward of combine is a dispatch, and the reverse.", ""
    )
    ranks.say_all("   token  y               dense           dx              dweights", lines)
    pairs = {
        "y": (y_TH, dense_NH[mine]),
        "dx": (x_TH.grad, x_NH.grad[mine]),
        "dweights": (weights_TK.grad, weights_NK.grad[mine]),
    }
    for name, (ours, dense) in pairs.items():  # these numbers are short in binary, so no rounding: equal means equal
        ranks.expect(torch.equal(ours.double(), dense.double()), f"{name} is not the dense result")


def multiply_by(factor: int) -> Callable[[Tensor], Tensor]:
    """An expert that can be checked by hand."""
    return lambda x: x * factor


def show(row: Tensor) -> str:
    """(1, 10) for a row of two numbers."""
    return f"({', '.join(f'{value:g}' for value in row.tolist())})"


if __name__ == "__main__":
    sys.exit(main())
