"""The two hops on kernels: rounds along the rail, each taken up by a call inside the node.

A dispatch sends round after round along the rail; the ranks of the node read what has come in out of the inbox of the
rank that it came to, with the kernels of the intranode backend. A combine goes back: these kernels add up what the
ranks of the node have for the inbox's rows, into the outbox; it goes home along the rail, and the nodes' sums are added
up there. Rows that stay in their node take one call of their own, beside the first round.

Sends have a stream of their own, so that both hops are under way at once; they share the SM budget. Launches stand in
an order in which a kernel waits only for what every rank launches before it: a send waits for the answers to the round
before the last, so it is launched behind them. Hence streams may share a queue of the GPU, and a launch may wait for
kernels that run, as the first one of a kernel can.

Every call is opened first: the ranks agree on it on the device, and where they do not, all that is launched for it
leaves (`NodeLegs.open`). The host waits for that only where it has to go on itself. Rows and weights that go home one
after the other are one call: a rank that refuses it, or raises before its second part, is missed by nobody there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from moe_ep._native.arguments import address
from moe_ep._native.exchange import NativeRows
from moe_ep._native.rail import NativeRound, RailKernels
from moe_ep.backends.header import OK, OPERATIONS, Header, status_of
from moe_ep.backends.node_legs import NodeLegs
from moe_ep.backends.node_rows import Load, aligned, kind_of
from moe_ep.backends.rail_memory import RailMemory
from moe_ep.backends.rail_routes import RailFlows, RailRoutes

NUM_SLOTS = 2  # rounds under way; kHopSlots of csrc/internode/rail.h


class TwoHopCalls:
    """Calls of one rank between nodes.

    Args:
        node: the exchange inside the node.
        rail: the rail, or None where there is one node.
        kernels: for the sum over nodes.
    """

    def __init__(self, node: NodeLegs, rail: RailMemory | None, kernels: RailKernels) -> None:
        self._node, self._rail, self._kernels = node, rail, kernels
        self._sending = torch.cuda.Stream(node.device, priority=-1)  # type: ignore[no-untyped-call]
        self.num_sms = 20

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream on which calls end."""
        return self._node.stream

    def close(self) -> None:
        """Until what this rank sent last is taken: then nobody reads its memory."""
        self.synchronize()  # a call that failed half-way has sends that nothing waits for
        if self._rail is not None:
            with torch.cuda.stream(self.stream):
                self._rail.drain(self.stream.cuda_stream)
            self.stream.synchronize()

    def synchronize(self) -> None:
        self._sending.synchronize()
        self._node.synchronize()

    def settle(self) -> None:
        """Until nothing of this rank runs, and nothing that it has put is on its way.

        Raises:
            EPTimeoutError: it is still on its way after the limit.
        """
        self.synchronize()
        if self._rail is not None:
            with torch.cuda.stream(self.stream):
                self._rail.settle(self.stream)

    # -- openings -----------------------------------------------------------------------------------------------------

    def agree(self, header: Header) -> None:
        """Opens a call that goes on on the host: waits, and raises what all ranks raise unless they agree."""
        self._node.await_go(OPERATIONS[header.operation], self._open(header, asks=True))

    def refuse(self, header: Header, status: int, error: Exception) -> NoReturn:
        """Opens the call in which the other ranks are, and refuses it."""
        question = self._open(header, status, asks=True)
        self._node.refused(OPERATIONS[header.operation], question, error)

    def _open(self, header: Header, status: int = OK, asks: bool = False) -> int:
        rail = None if self._rail is None else self._rail.native
        self.stream.wait_stream(torch.cuda.current_stream(self._node.device))
        if rail is not None and not torch.cuda.is_current_stream_capturing():
            self.stream.wait_stream(self._sending)  # a call that failed half-way has sends that it did not await
        with torch.cuda.stream(self.stream):
            return self._node.open(header, rail, status, asks)

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def move(
        self,
        routes: RailRoutes,
        header: Header,
        x: Tensor,
        scales: Tensor | None = None,
        weights: Tensor | None = None,
        made_rows: Tensor | None = None,
        joins: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Rows [T, H] along a plan, with their scales; or times [R] `weights`, with the gradient of these.

        The gradient is made where `made_rows` [R, H] is given.
        """
        load, operation = Load(x, scales, None), OPERATIONS[header.operation]
        outs = load.outs(routes.own.num_rows)
        grad_weights = None if made_rows is None or weights is None else torch.empty_like(weights)
        rows, row_bytes = load.native(*outs), load.row_bytes
        most_bytes = self._node.needs(routes.own, row_bytes)
        if routes.calls and (weights is not None or self._rail is None or not self._rail.block_number):
            most_bytes = max(most_bytes, *(self._node.needs(call, row_bytes) for call in routes.calls))
        num_sms = self._begin(routes, header, row_bytes, most_bytes)
        extra = (weights, made_rows, grad_weights)
        with torch.cuda.stream(self.stream):
            rounds = self._rounds(routes, routes.outward, operation, row_bytes)
            leaving = [(given[0], given[1], given[2]) for given in rows]
            for number in range(NUM_SLOTS):
                self._send_rows(routes, rounds, number, leaving, routes.token)
            self._node.move(routes.own, operation, load.kind, rows, num_sms, (), *extra)
            for number, call in enumerate(routes.calls):
                self._take_up(rounds[number])
                came, places = self._inbox_rows(number, rows, row_bytes, weights is None)
                self._node.move(call, operation, load.kind, came, num_sms, places, *extra)
                self._answer(routes, rounds, number)
                self._send_rows(routes, rounds, number + NUM_SLOTS, leaving, routes.token)
        self._end((load, outs, *extra, routes), joins)
        return *load.as_given(*outs), grad_weights

    def _send_rows(
        self,
        routes: RailRoutes,
        rounds: Sequence[NativeRound],
        number: int,
        kinds: Sequence[tuple[int, int, int]],
        row: Tensor,
    ) -> None:
        """Rows `row` of each kind (address, stride, bytes), as a round of the call, if it has that many."""
        if number < len(routes.calls):
            assert self._rail is not None
            self._rail.native.send(rounds[number], kinds, row.data_ptr(), self._rail_sms, self._sending.cuda_stream)

    def _inbox_rows(
        self, number: int, rows: Sequence[NativeRows], row_bytes: int, in_place: bool
    ) -> tuple[list[NativeRows], tuple[int, ...]]:
        """What came in a round, as rows of this rank's; and where the peers find them, if they read them there."""
        assert self._rail is not None
        place = self._rail.native.inbox(number % NUM_SLOTS)
        block, numbers, places, came = self._rail.block_number, 0, [], []
        for kind, (_, _, kind_bytes, out, poison, padding) in enumerate(rows):
            came.append((self._rail.native.block + place, row_bytes, kind_bytes, out, poison, padding))
            numbers |= block << 8 * kind
            places += [place, row_bytes]
            place += kind_bytes
        return came, (numbers, *places) if in_place and block else ()

    # -- combine ----------------------------------------------------------------------------------------------------

    def combine(
        self,
        routes: RailRoutes,
        header: Header,
        rows: Tensor,
        weights: Tensor | None = None,
        bias: Sequence[Tensor] = (),
        joins: bool = True,
        opens: bool = True,
        widest_bytes: int = 0,
    ) -> Tensor:
        """Rows [R, H] home, summed: slots, then the ranks of a node, then nodes behind the tensors of `bias`.

        Without `opens` it is part of the call before, which made room for `widest_bytes` a row.
        """
        given, operation = rows.shape[1], OPERATIONS[header.operation]
        rows = aligned(rows).contiguous()
        bias = tuple(aligned(tensor).contiguous() for tensor in bias)
        row_bytes = rows.shape[1] * rows.element_size()
        y = rows.new_empty(routes.own.num_tokens, rows.shape[1])
        straight = routes.straight is not None and bool(routes.calls)
        own = rows if straight else torch.empty_like(y) if routes.calls else y
        calls = () if straight else (routes.own, *routes.calls)
        widest_bytes = max(row_bytes, widest_bytes)
        most_bytes = max((self._node.needs(call, widest_bytes) for call in calls), default=0)
        num_sms = self._begin(routes, header, row_bytes, most_bytes, opens)
        with torch.cuda.stream(self.stream):
            rounds = self._rounds(routes, routes.homeward, operation, row_bytes)
            leaving = [(rows.data_ptr(), row_bytes, row_bytes)]
            if routes.straight is not None:
                for number in range(NUM_SLOTS):
                    self._send_rows(routes, rounds, number, leaving, routes.straight.row)
            elif routes.calls:
                self._send_sums(routes, rounds, 0, operation, rows, weights, num_sms)
            if not straight:
                self._node.combine(
                    routes.own, operation, rows, own.data_ptr(), num_sms, weights, () if routes.calls else bias
                )
            for number in range(len(routes.calls)):
                if number + 1 < len(routes.calls) and not straight:  # ahead, so that the network has work meanwhile
                    self._send_sums(routes, rounds, number + 1, operation, rows, weights, num_sms)
                self._take_up(rounds[number])
                self._add_nodes(routes, number, own, bias, y, num_sms)
                self._answer(routes, rounds, number)
                if routes.straight is not None:
                    self._send_rows(routes, rounds, number + NUM_SLOTS, leaving, routes.straight.row)
        self._end((rows, weights, own, y, bias, routes), joins)
        return y[:, :given] if given != y.shape[1] else y

    def _send_sums(
        self,
        routes: RailRoutes,
        rounds: Sequence[NativeRound],
        number: int,
        operation: str,
        rows: Tensor,
        weights: Tensor | None,
        num_sms: int,
    ) -> None:
        """What the ranks of the node have for the rows of a round, into the outbox and off."""
        assert self._rail is not None
        rail, stream = self._rail.native, self.stream.cuda_stream
        rail.wait_free(rounds[number], stream)
        outbox = rail.block + rail.outbox(number % NUM_SLOTS)
        self._node.combine(routes.calls[number], operation, rows, outbox, num_sms, weights)
        self._sending.wait_stream(self.stream)
        rail.send(rounds[number], [], 0, self._rail_sms, self._sending.cuda_stream)

    def _add_nodes(
        self, routes: RailRoutes, number: int, own: Tensor, bias: Sequence[Tensor], y: Tensor, num_sms: int
    ) -> None:
        assert self._rail is not None
        rail, size = self._rail, routes.round_tokens
        row_bytes, kind = y.shape[1] * y.element_size(), kind_of(y.dtype)
        self._kernels.node_sum(
            inbox=rail.native.block + rail.native.inbox(number % NUM_SLOTS),
            flow_bytes=routes.flow_rows * row_bytes,
            own=own.data_ptr(),
            own_by_place=routes.straight is not None,
            bias=(address(bias[0] if bias else None), address(bias[1] if len(bias) > 1 else None)),
            place=(routes.straight or routes).token_place.data_ptr(),
            node=rail.node,
            num_nodes=rail.num_nodes,
            first_token=number * size,
            num_tokens=min(max(y.shape[0] - number * size, 0), size),
            row_bytes=row_bytes,
            y=y.data_ptr(),
            poison=kind.poison,
            state=self._node.state_address,
            dtype=kind.name,
            num_sms=num_sms,
            stream=self.stream.cuda_stream,
        )

    # -- rounds -----------------------------------------------------------------------------------------------------

    @property
    def _rail_sms(self) -> int:
        """The calls inside the node have more to do: they take up what came, and the own rows as well."""
        return max(1, self.num_sms // 3)

    def _begin(self, routes: RailRoutes, header: Header, row_bytes: int, most_bytes: int, opens: bool = True) -> int:
        """Opens a call behind the caller's stream, and makes room in the slots; SMs of the calls inside the node."""
        if opens:
            self._open_with_room(routes, header, row_bytes, most_bytes)
        else:
            assert not self._node.lacks_room(most_bytes), "the call was opened without room for all of it"
            self.stream.wait_stream(torch.cuda.current_stream(self._node.device))
        with torch.cuda.stream(self.stream):
            self._node.hold_for_graph(routes)
        if not routes.calls:
            return self.num_sms
        self._sending.wait_stream(self.stream)  # the first round is counted from where the last call ended
        return max(1, self.num_sms - self._rail_sms)

    def _open_with_room(self, routes: RailRoutes, header: Header, row_bytes: int, most_bytes: int) -> None:
        grows = self._node.lacks_room(most_bytes)
        if grows and (obstacle := self._node.why_not_grow(most_bytes)) is not None:
            self.refuse(header, status_of(obstacle), obstacle)  # the other nodes do not know
        question = self._open(header, asks=grows)
        if grows:  # together with the ranks of the node alone, so not before all ranks agree
            self._node.await_go(OPERATIONS[header.operation], question)
            self._node.make_room(routes.own, row_bytes, most_bytes)

    def _end(self, tensors: tuple[object, ...], joins: bool) -> None:
        if joins:
            torch.cuda.current_stream(self._node.device).wait_stream(self.stream)
        else:
            self._node.keep(tensors)

    def _rounds(self, routes: RailRoutes, flows: RailFlows, operation: str, row_bytes: int) -> list[NativeRound]:
        if self._rail is None:
            return []
        return [
            self._rail.rounds(
                number=number,
                num_rounds=routes.num_rounds,
                operation=OPERATIONS.index(operation),
                row_bytes=row_bytes,
                flow_bytes=routes.flow_rows * row_bytes,
                first_out=flows.first_out.data_ptr(),
                num_in=flows.num_in.data_ptr(),
            )
            for number in range(routes.num_rounds)
        ]

    def _take_up(self, this: NativeRound) -> None:
        assert self._rail is not None
        self._rail.native.wait(this, self.stream.cuda_stream)

    def _answer(self, routes: RailRoutes, rounds: Sequence[NativeRound], number: int) -> None:
        """Frees the inbox. The last answer of a call comes behind all its sends, for it counts the rounds on."""
        assert self._rail is not None
        is_last, stream = number == len(routes.calls) - 1, self.stream.cuda_stream
        if is_last:
            self.stream.wait_stream(self._sending)
        self._rail.native.take(rounds[number], stream)
        if is_last and number < routes.num_rounds - 1:
            self._rail.native.take(rounds[-1], stream)
