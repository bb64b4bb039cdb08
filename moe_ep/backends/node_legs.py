"""Calls inside a node as parts of calls between nodes: into and out of memory that the whole call owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ep._native.arguments import address
from moe_ep._native.exchange import NativeRows
from moe_ep.backends.combine_rounds import rows_to_make_room_for
from moe_ep.backends.header import OPERATIONS
from moe_ep.backends.node_calls import NodeCalls
from moe_ep.backends.node_memory import NodeMemory
from moe_ep.backends.node_route import Route
from moe_ep.backends.node_rows import Kind, kind_of


class NodeLegs(NodeCalls):
    """One rank's part of the exchange inside its node. Every call runs on `stream`, and nothing waits for it."""

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
        """Bytes that a move puts into the slot of the rank with the most rows; all ranks work out the same."""
        return route.staging.most * row_bytes if len(self.ranks) > 1 else 0

    def needs_of_sums(self, route: Route, row_bytes: int) -> int:
        """The same of a combine, which may run in rounds."""
        return rows_to_make_room_for(route.staging) * row_bytes if len(self.ranks) > 1 else 0

    def make_room(self, route: Route, row_bytes: int, most_bytes: int) -> None:
        """Before the first part of a call; collective where there is too little."""
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
