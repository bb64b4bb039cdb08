"""The contract between `Buffer` and the thing that moves rows.

Letters: T tokens on this rank, H hidden, K slots a token, R rows handed out, S compact rows. Every method is
collective over the EP group: all ranks call the same methods in the same order. Orders of rows and of sums are part
of the contract (`moe_ep.handle`, `moe_ep.ordered_sum`), so all backends give the same bits in forward and in dx.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch import Tensor

from moe_ep.handle import DispatchHandle, Layout
from moe_ep.placement import ExpertPlacement

if TYPE_CHECKING:
    from moe_ep.backends.node_low_latency import NodeLowLatency


@dataclass(frozen=True, eq=False)
class DispatchRequest:
    """A checked call of dispatch.

    Attributes:
        x: [T, H] rows, any strides, float64, float32, bfloat16 or float16; from `Buffer.dispatch` also one-byte dtypes.
        topk_idx: [T, K] int64 or int32, any strides; ids not yet checked.
        topk_weights: [T, K] float32 (or float64 beside float64 rows), or None.
        placement: owner of every expert.
        layout, alignment, max_rows: as `moe_ep.dispatch` takes them.
        num_channels: for `DispatchHandle.num_channels`.
        x_needs_grad, weights_need_grad: whether this rank will want that gradient.
        grad_enabled: whether this rank can take part in a backward; must be alike on all ranks.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    placement: ExpertPlacement
    layout: Layout
    alignment: int
    max_rows: int | None
    num_channels: int
    x_needs_grad: bool
    weights_need_grad: bool
    grad_enabled: bool = True


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """What is known once counts, ids and weights have travelled; the rows have not yet.

    Attributes:
        handle: the routing.
        row_idx: local ids of the rows: [R, K] if compact, [R] if expert_major.
        row_weights: the weights beside them, or None.
        tokens_per_expert, real_tokens_per_expert: L ints with and without padding; None with `max_rows`.
        expert_counts: [L] int32, without padding.
        expert_offsets: [L + 1] int32, with padding.
    """

    handle: DispatchHandle
    row_idx: Tensor
    row_weights: Tensor | None
    tokens_per_expert: list[int] | None
    real_tokens_per_expert: list[int] | None
    expert_counts: Tensor
    expert_offsets: Tensor


class Backend(Protocol):
    """Moves rows between the ranks of one EP group."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    num_sms: int  # SM budget of the next calls; a backend without kernels of its own has no use for it
    joins_stream: bool  # whether the current stream waits for the next calls; else `stream` tells when they end

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of the kernels; None where calls run on the current one, or on the CPU."""

    @property
    def low_latency(self) -> NodeLowLatency | None:
        """Kernels for the low-latency calls; None where those go through the methods below."""

    def plan(self, request: DispatchRequest) -> DispatchPlan:
        """Opens a dispatch: exchanges headers, counts, ids and weights.

        Raises:
            ValueError: an id outside [-1, E), on every rank, naming rank, token, slot and id. With `max_rows` the
                id counts as -1 and the fault is kept for `take_faults`.
            ConfigError: two ranks differ in a setting.
            EPTimeoutError: a rank did not come.
        """

    def plan_and_dispatch(
        self, request: DispatchRequest, scales: Tensor | None
    ) -> tuple[DispatchPlan, Tensor, Tensor | None]:
        """`plan`, and the rows of the request along it, as soon as they can start: rows [R, H] and scales [R, n].

        As `dispatch` moves them, and with `scales` as `dispatch_scaled` does.
        """

    def open_dispatch(self, handle: DispatchHandle, x: Tensor) -> None:
        """Opens a dispatch along a handle: headers only, nothing is counted."""

    def exchange_counts(self, num_tokens_per_expert: Tensor, placement: ExpertPlacement) -> list[int]:
        """Sums [E] int counts over the sources, for the local experts: L ints."""

    def dispatch(self, handle: DispatchHandle, x: Tensor) -> Tensor:
        """Moves [T, H] rows as the handle says: the payload of a dispatch. Returns fresh [R, H], padding zero.

        Any dtype of 1, 2, 4 or 8 bytes travels (FP8 rows, their scales), and any strides.
        """

    def dispatch_scaled(self, handle: DispatchHandle, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Moves FP8 rows [T, H] and their scales [T, n] together. Scales of padding rows are 1 (`UNIT_SCALE`)."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Memory that the peers read in place, or None where this backend has no such. Collective."""

    def dispatch_backward(
        self, handle: DispatchHandle, grad_rows: Tensor, grad_row_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The adjoint of dispatch: ([R, H], weights) -> (dx [T, H] or None, dw [T, K] or None).

        A gradient that no rank wants (`handle.x_needs_grad`, `handle.weights_need_grad`) does not travel.
        """

    def open_combine(
        self, handle: DispatchHandle, rows: Tensor, weights: Tensor | None, exact: bool, needs_grad: bool
    ) -> bool:
        """Opens a combine and returns whether any rank will want its gradient."""

    def combine(
        self,
        handle: DispatchHandle,
        rows: Tensor,
        weights: Tensor | None,
        exact: bool,
        bias: Sequence[Tensor] = (),
    ) -> Tensor:
        """Moves [R, H] home and adds up, times the [R] weights if given: the payload of a combine. Returns [T, H].

        Tensors of `bias` ([T, H], dtype of the rows) are the first terms of the sum at home.
        """

    def sum_weights(self, handle: DispatchHandle, weights: Tensor) -> Tensor:
        """Adds up the [R, K] weights of compact rows at home, ranks ascending, in float32: [T, K]."""

    def combine_backward(
        self, handle: DispatchHandle, grad_y: Tensor, rows: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The adjoint of combine: dy [T, H] -> (grad_rows [R, H], grad_weights [R] or None).

        `rows` is given where grad_weights is wanted.
        """

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a tensor in place over the EP group."""

    def refuse(self, operation: str, error: Exception, num_parts: int = 1) -> NoReturn:
        """Tells all ranks that this one refuses its input; every rank raises, this one `error` itself.

        `num_parts`: 2 where rows and their weights would go home one after the other.
        """

    def settle(self) -> None:
        """Before a call whose host waits for all ranks, and before it is refused: raises what became of the last sum.

        All ranks raise it alike, and none comes to that call: there is nobody to be told of a refusal.
        """

    def take_faults(self) -> list[str]:
        """Faults of calls without a host wait (overflow of `max_rows`, bad ids), and forgets them."""

    def reset(self) -> None:
        """Makes the backend usable after an `EPTimeoutError`. Collective."""

    @property
    def members(self) -> tuple[int, ...]:
        """Places of the ranks that take part: all of them, but for those that `shrink` left out."""

    def shrink(self, note: int) -> dict[int, int]:
        """After an `EPTimeoutError`: goes on without those that do not come, until `reset`. Collective over the rest.

        Ranks keep their places. A call that would move rows to or from a rank that was left out is refused.

        Args:
            note: a number that the ranks tell each other.

        Returns:
            By place, the `note` of each rank that came.

        Raises:
            EPTimeoutError: the others went on without this rank.
        """

    def close(self) -> None:
        """Releases what the backend holds, without communication."""
