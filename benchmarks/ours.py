"""moe_ep as a benchmarked system, through its public calls alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import moe_ep
from benchmarks.systems import DTYPES, Case, Inputs, Rows, System
from benchmarks.timing import Call

STAGED_ROWS = 6  # for each token: two of dispatch and four of combine
ROW_ELEMENT_BYTES = 2
TRANSPORTS = {"torch": "collectives", "intranode": "sm", "internode": "rdma"}


class Ours(System):
    """A Buffer with its own SM budget.

    Args:
        inputs: of this rank.
        backend: as for `moe_ep.Buffer`.
        num_sms: SM budget; None for the default.
        ranks_per_node, hop: as for `moe_ep.Buffer`.
    """

    name = "moe_ep"
    can_register = True

    def __init__(
        self,
        inputs: Inputs,
        backend: str,
        num_sms: int | None,
        ranks_per_node: int | None = None,
        hop: str = "auto",
    ) -> None:
        self.inputs = inputs
        # Memory for the first calls, as DeepEP's callers give it: a call with a handle does not make more.
        num_bytes = STAGED_ROWS * inputs.shape.tokens * inputs.shape.hidden * ROW_ELEMENT_BYTES
        self.buffer = moe_ep.Buffer(
            inputs.world.group,
            num_bytes,
            backend=backend,
            num_sms=num_sms,
            ranks_per_node=ranks_per_node,
            hop=hop,
        )
        self.nodes = inputs.world.size // (ranks_per_node or inputs.world.size)
        self._x: dict[tuple[str, bool], Any] = {}
        self.backend = self.buffer.backend_name
        self.transport = TRANSPORTS[self.backend] if hop in ("auto", "nvshmem") else hop
        self.num_sms = None if self.backend == "torch" else self.buffer.num_sms

    def call(self, case: Case, dtype: str, registered: bool) -> Call | None:
        op, layout = case
        if dtype == "fp8" and (op == "combine" or layout == "expert_major"):
            return None
        if op == "dispatch_combine_fwd_bwd":
            return None if registered else self._round_trip(dtype)
        made = {
            ("dispatch", "compact"): self._dispatch,
            ("cached_dispatch", "compact"): self._cached_dispatch,
            ("combine", "compact"): self._combine,
            ("dispatch", "expert_major"): self._dispatch_expert_major,
            ("cached_dispatch", "expert_major"): self._cached_dispatch_expert_major,
            ("combine", "expert_major"): self._combine_expert_major,
        }
        return made[case](dtype, registered)

    def close(self) -> None:
        self._x.clear()
        self.buffer.close()

    def _placed(self, rows: Rows, registered: bool) -> Any:
        """Rows as an ordinary tensor, or in the buffer's own memory."""
        if isinstance(rows, tuple):
            return tuple(self._placed(part, registered) for part in rows)
        return self.buffer.empty(rows.shape, rows.dtype).copy_(rows) if registered else rows.detach().clone()

    def _input(self, dtype: str, registered: bool) -> Any:
        """x, placed once."""
        if (dtype, registered) not in self._x:
            self._x[dtype, registered] = self._placed(self.inputs.rows(dtype), registered)
        return self._x[dtype, registered]

    def _first(self, x: Rows) -> tuple[Any, ...]:
        inputs = self.inputs
        layout = self.buffer.get_dispatch_layout(inputs.idx_TK, inputs.shape.num_experts)
        per_rank, per_node, per_expert, in_rank, _ = layout
        return self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=inputs.idx_TK,
            topk_weights=inputs.weights_TK,
        )

    def _dispatch(self, dtype: str, registered: bool) -> Call:
        x = self._input(dtype, registered)
        return lambda: self._first(x)[0]

    def _cached_dispatch(self, dtype: str, registered: bool) -> Call:
        x = self._input(dtype, registered)
        handle = self._first(x)[4]
        return lambda: self.buffer.dispatch(x, handle=handle)[0]

    def _combine(self, dtype: str, registered: bool) -> Call:
        received, _, _, _, handle, _ = self._first(self._input(dtype, False))
        rows = self._placed(received, registered)
        return lambda: self.buffer.combine(rows, handle)[0]

    def _expert_major(self, x: Tensor) -> moe_ep.DispatchOutput:
        inputs = self.inputs
        with torch.no_grad():
            return moe_ep.dispatch(
                self.buffer, x, inputs.idx_TK, inputs.weights_TK, num_experts=inputs.shape.num_experts
            )

    def _dispatch_expert_major(self, dtype: str, registered: bool) -> Call:
        x = self._input(dtype, registered)
        return lambda: self._expert_major(x).x

    def _cached_dispatch_expert_major(self, dtype: str, registered: bool) -> Call:
        """The backward of an unweighted combine: a dispatch along its handle."""
        x = self._input(dtype, registered)
        out = self._expert_major(x)
        rows = out.x.detach().requires_grad_()
        y = moe_ep.combine(self.buffer, rows, out.handle)
        return lambda: torch.autograd.grad(y, rows, x, retain_graph=True)[0]

    def _combine_expert_major(self, dtype: str, registered: bool) -> Call:
        out = self._expert_major(self._input(dtype, False))
        rows = self._placed(out.x, registered)

        def call() -> Tensor:
            with torch.no_grad():
                return moe_ep.combine(self.buffer, rows, out.handle, out.topk_weights)

        return call

    def _round_trip(self, dtype: str) -> Call:
        """Dispatch, identity experts, weighted combine, and the backward of both; gives dx."""
        inputs = self.inputs
        g = torch.Generator(device=inputs.world.device).manual_seed(4000 + inputs.world.rank)
        x = self._placed(inputs.rows(dtype), False).requires_grad_()
        dy = torch.randn(x.shape, generator=g, device=x.device).to(DTYPES[dtype])
        weights = inputs.weights_TK.clone().requires_grad_()

        def call() -> Tensor:
            out = moe_ep.dispatch(self.buffer, x, inputs.idx_TK, weights, num_experts=inputs.shape.num_experts)
            y = moe_ep.combine(self.buffer, out.x, out.handle, out.topk_weights)
            return torch.autograd.grad(y, (x, weights), dy)[0]

        return call
