"""Calls inside a node as parts of calls between nodes: into and out of memory that the whole call owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep._native.arguments import address
from moe_ep._native.exchange import NativeRows
from moe_ep._native.rail import NativeRail
from moe_ep.backends.combine_rounds import rows_to_make_room_for
from moe_ep.backends.header import NUM_MATCH_WORDS, OK, OPERATIONS, Header
from moe_ep.backends.leg_faults import LegFaults, Reasons
from moe_ep.backends.node_calls import NodeCalls
from moe_ep.backends.node_header import pack
from moe_ep.backends.node_memory import NodeMemory
from moe_ep.backends.node_route import Route
from moe_ep.backends.node_rows import Kind, kind_of


class NodeLegs(NodeCalls):
    """One rank's part of the exchange inside its node. Every call runs on `stream`, and the caller's does not join it.

    Args:
        group: the EP group, or None for a single rank.
        timeout_secs: limit of every wait.
        part: places in the group of the ranks of this node.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_secs: float, part: range) -> None:
        super().__init__(group, timeout_secs, part=part)
        self._faults: LegFaults = LegFaults(self._memory)

    @property
    def memory(self) -> NodeMemory:
        return self._memory

    @property
    def state_address(self) -> int:
        """Of the exchange, as `moe_ep._native.rail` takes it."""
        return self._exchange.state_address

    @property
    def record_address(self) -> int:
        return self._exchange.record_address

    def take_faults(self) -> list[str]:
        return self._faults.take()

    def raise_if_dead(self, operation: str) -> None:
        """After a time limit, or when closed, nothing is started."""
        if self._closed or self._faults.is_dead:
            self._refuse_to_launch(operation)

    def must_not_capture(self, operation: str) -> None:
        self._must_not_capture(operation)

    def why_not_grow(self, need_bytes: int) -> RuntimeError | None:
        """What stands against more memory on all ranks of the node; raises where only this call is in its way."""
        self._must_not_grow_in_capture(need_bytes)
        return self._why_not_grow(need_bytes)

    def tell_reasons(self, reasons: Reasons) -> None:
        """Where there are other nodes: through `reasons` their ranks say why they refuse."""
        self._faults.reasons = reasons

    @property
    def is_closed(self) -> bool:
        return self._closed

    def open(self, header: Header, rail: NativeRail | None, status: int = OK, asks: bool = False) -> int:
        """Opens a call of the whole EP group, along the rail where there are other nodes: what is started until the
        next opening fills its outputs and leaves, unless all ranks agreed.

        Args:
            header: of the call.
            rail: None where there is one node.
            status: OK, or the number of the error with which this rank refuses.
            asks: whether the host will wait for what became of it.

        Returns:
            The number of the question, or 0.
        """
        operation, packed = OPERATIONS[header.operation], pack(header, status, opens=True)
        question = next(self._questions) if asks else 0
        if rail is None:
            self._launch(operation, (), self._exchange.header_only, packed, NUM_MATCH_WORDS, question)
        else:
            self.raise_if_dead(operation)
            rail.open(self._exchange.opening(packed, NUM_MATCH_WORDS, question), self._stream.cuda_stream)
        return question

    def await_go(self, operation: str, question: int) -> None:
        """Waits for an opening, and raises what became of it unless all ranks agreed."""
        self._ask(operation, question, None)

    def refused(self, operation: str, question: int, error: Exception) -> NoReturn:
        """Raises an opening that this rank refused as all ranks raise it."""
        self._faults.await_answer(operation, question, self._host_limit_secs)
        self._faults.refused(operation, error, self._join_rows)

    def lacks_room(self, num_bytes: int) -> bool:
        return num_bytes > self._exchange.slot_bytes

    def hold_for_graph(self, what: object) -> None:
        """Where a CUDA graph captures the current stream: it reads `what` and memory of ours, whichever kernels run."""
        if torch.cuda.is_current_stream_capturing():
            self._is_in_graph = True
            self._kept_for_graphs.append((what,))

    def synchronize(self) -> None:
        self._synchronize()

    def keep(self, tensors: tuple[object, ...]) -> None:
        """Holds what calls read and write until the stream has come this far."""
        self._keep(tensors, torch.cuda.is_current_stream_capturing())

    def needs(self, route: Route, row_bytes: int) -> int:
        """Bytes that a slot has to hold for calls along a route; all ranks work out the same."""
        return rows_to_make_room_for(route.staging) * row_bytes if len(self.ranks) > 1 else 0

    def make_room(self, route: Route, row_bytes: int, most_bytes: int) -> None:
        """Before the first part of a call that all ranks have agreed on; collective where there is too little."""
        self._grow_for(route, row_bytes, most_bytes)

    def move(
        self,
        route: Route,
        operation: str,
        kind: Kind,
        rows: list[NativeRows],
        num_sms: int,
        places: tuple[int, ...] = (),
        weights: Tensor | None = None,
        made_rows: Tensor | None = None,
        grad_weights: Tensor | None = None,
    ) -> None:
        """Rows along a route, from where `rows` says, or from where `places` says for the peers too."""
        row_bytes = sum(given[2] for given in rows)
        self._launch(
            operation,
            (),
            self._exchange.move,
            num_sms,
            route.native,
            OPERATIONS.index(operation),
            row_bytes,
            kind.number,
            0 if places or len(self.ranks) == 1 else route.num_tokens * row_bytes,
            places,
            rows,
            kind.name,
            address(weights),
            address(made_rows),
            address(grad_weights),
        )

    def combine(
        self,
        route: Route,
        operation: str,
        rows: Tensor,
        y: int,
        num_sms: int,
        weights: Tensor | None = None,
        bias: Sequence[Tensor] = (),
    ) -> None:
        """Sums of the rows [R, H] of a route to `y`, the address of [T, H]."""
        kind, row_bytes = kind_of(rows.dtype), rows.shape[1] * rows.element_size()
        rounds, geometries = self._rounds(route, row_bytes)
        self._launch(
            operation,
            (),
            self._exchange.combine,
            num_sms,
            route.native,
            OPERATIONS.index(operation),
            row_bytes,
            kind.number,
            rounds.need_rows * row_bytes,
            (),
            rows.data_ptr(),
            row_bytes,
            y,
            kind.poison,
            kind.name,
            address(bias[0] if bias else None),
            address(bias[1] if len(bias) > 1 else None),
            address(weights),
            weights is not None,
            -1 if weights is None else kind_of(weights.dtype).number,
            False,
            0,
            0,
            rounds.number,
            rounds.slot_rows,
            address(geometries),
        )
