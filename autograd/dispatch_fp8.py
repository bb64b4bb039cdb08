"""`moe_ep.dispatch_fp8`: rows are cast once and travel as FP8 with their scales. Its backward is that of dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from moe_ep.autograd.dispatch_backward import Arrival, backward_of_dispatch, tie
from moe_ep.autograd.once import once_differentiable
from moe_ep.buffer import Buffer
from moe_ep.checks import as_weights, dispatch_request
from moe_ep.fp8 import quantize_1x128
from moe_ep.fp8.rows import Fp8Rows
from moe_ep.handle import DispatchHandle
from moe_ep.integrations import transformer_engine

FP8_ALIGNMENT: Final = 16  # rows of an expert, what FP8 products with 1x128 blocks or one scale ask for

GroupMax = Callable[[Tensor], Tensor]
Cast = Callable[[Tensor, GroupMax], tuple[Tensor, Tensor]]  # rows -> e4m3 [T, H], scales [T, B] or [1]


@dataclass(frozen=True, eq=False)
class Fp8DispatchOutput:
    """What `moe_ep.dispatch_fp8` returns: `rows`, and beside them what `DispatchOutput` has."""

    rows: Fp8Rows
    topk_idx: Tensor
    topk_weights: Tensor | None
    tokens_per_expert: list[int]
    real_tokens_per_expert: list[int]
    expert_counts: Tensor
    expert_offsets: Tensor
    handle: DispatchHandle


class _Fp8Dispatch(Arrival):
    """The face of rows; their bytes do not come here."""

    @staticmethod
    @once_differentiable("dispatch_fp8")
    def backward(
        ctx: Any, grad_rows: Tensor, grad_row_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        return backward_of_dispatch(ctx, grad_rows, grad_row_weights)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dispatch_fp8(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    *,
    num_experts: int,
    alignment: int = FP8_ALIGNMENT,
    power_of_two: bool = True,
    cast: Cast | None = None,
) -> Fp8DispatchOutput:
    """Sends every token to the ranks of its experts as FP8 (e4m3), expert_major. Collective, differentiable.

    The gradient goes straight through the cast and travels in the dtype of x. Letters as in `moe_ep.dispatch`.

    Args:
        buffer: the exchange.
        x: [T, H] bfloat16, float16 or float32; or a `Float8BlockwiseQTensor` of Transformer Engine with row-wise 1x128
            blocks, whose bytes travel as they are; or a `Float8Tensor`, which must have the same scale on all ranks
            (looked at, with two small exchanges).
        topk_idx, topk_weights: as `moe_ep.dispatch` takes them.
        num_experts: E, the same on every rank.
        alignment: rows of each expert are padded with zeros to a multiple of this, their scales are 1.
        power_of_two: scales are powers of two; no meaning for rows that are FP8 already.
        cast: another cast than that to 1x128 blocks: from rows, and a function for the largest of a float32 scalar over
            the ranks, to e4m3 [T, H] and float32 scales, [T, n], or [1] where they are the same on all ranks.

    Returns:
        Fp8DispatchOutput: the rows as bytes and scales, their ids and weights, counts, and the handle for
        `moe_ep.combine`.

    Raises:
        TypeError, ValueError, ConfigError, EPTimeoutError: as `moe_ep.dispatch`.
    """
    backend, largest_of_all = buffer.backend, _GroupMax(buffer)
    backend.settle()
    try:
        buffer.check()
        placement = buffer.placement(num_experts)
        request = dispatch_request(
            x, topk_idx, topk_weights, placement, "expert_major", alignment, None, buffer.num_channels
        )
        weights = None if topk_weights is None else as_weights(topk_weights, x.dtype, "topk_weights")
        with torch.no_grad():
            data, scales = _payload(x, power_of_two, cast, largest_of_all)
    except (TypeError, ValueError, RuntimeError) as error:
        if largest_of_all.has_failed:
            raise
        backend.refuse("dispatch", error)
    is_shared = scales.dim() == 1  # one scale, the same on all ranks: it stays
    with torch.no_grad():
        request = replace(request, x=data)
        plan, received, received_scales = backend.plan_and_dispatch(request, None if is_shared else scales)
    nothing = torch.full((), float("nan"), dtype=x.dtype, device=x.device).expand(plan.handle.num_rows, x.shape[1])
    face, row_weights = tie(_Fp8Dispatch, buffer, x, weights, plan, nothing)
    assert plan.tokens_per_expert is not None
    assert plan.real_tokens_per_expert is not None
    return Fp8DispatchOutput(
        rows=Fp8Rows(
            face, received, scales if received_scales is None else received_scales, tuple(plan.tokens_per_expert)
        ),
        topk_idx=plan.row_idx,
        topk_weights=row_weights,
        tokens_per_expert=plan.tokens_per_expert,
        real_tokens_per_expert=plan.real_tokens_per_expert,
        expert_counts=plan.expert_counts,
        expert_offsets=plan.expert_offsets,
        handle=plan.handle,
    )


def _payload(x: Tensor, power_of_two: bool, cast: Cast | None, group_max: GroupMax) -> tuple[Tensor, Tensor]:
    if transformer_engine.is_quantized(x):
        data, scales = transformer_engine.payload_of(x)
        if scales.dim() == 1:
            _check_one_scale(scales[0], group_max)
        return data, scales
    if cast is None:
        return quantize_1x128(x.detach(), power_of_two)
    return cast(x.detach(), group_max)


def _check_one_scale(scale: Tensor, group_max: GroupMax) -> None:
    """All ranks raise alike; they wait for counts on the host soon after."""
    largest, smallest = float(group_max(scale)), -float(group_max(-scale))
    if largest != smallest:
        raise ValueError(
            f"x is a tensor with one scale, {float(scale):g}, and those of the ranks go from {smallest:g} to "
            f"{largest:g}; rows travel without it, so it must be the same: quantise with the largest element of all "
            "ranks, or in 1x128 blocks."
        )


class _GroupMax:
    """The largest of a float32 scalar over the ranks of a buffer. Collective.

    Attributes:
        has_failed: the exchange raised, as it did on every rank: there is nobody left to be told of a refusal.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.has_failed = False

    def __call__(self, value: Tensor) -> Tensor:
        if self._buffer.group_size == 1:
            return value
        places = torch.zeros(self._buffer.group_size, dtype=torch.float32, device=value.device)
        places[self._buffer.rank] = value
        try:
            return self._buffer.all_reduce(places).max()
        except Exception:
            self.has_failed = True
            raise
