"""Checks of what callers hand to the low-latency calls, before anything travels.

T tokens of this rank, H hidden, K slots a token, E experts, L of them local, M the most tokens of a rank, N = W * M.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_ep.backends.base import DispatchRequest
from moe_ep.checks import as_weights, check_int, check_tensor, dispatch_request
from moe_ep.errors import ConfigError
from moe_ep.fp8 import BLOCK_ELEMS
from moe_ep.low_latency.layout import (
    AS_GIVEN,
    FORMATS,
    FP8,
    FP8_ROUNDED,
    FP8_UE8M0,
    UE8M0_PER_WORD,
    LowLatencyHandle,
    NodeRouting,
)
from moe_ep.placement import ExpertPlacement

CALLS = ("low_latency_dispatch", "low_latency_combine")
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_alike(call: int, of_ranks: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """The numbers of all `ranks` are equal: index in CALLS, M, index in FORMATS; whatever follows is not looked at."""
    meanings = (("the operation", CALLS), ("num_max_dispatch_tokens_per_rank", None), ("what travels", FORMATS))
    for column, (meaning, names) in enumerate(meanings):
        values = [of_ranks[rank][column] for rank in ranks]
        other = next((place for place, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            one, differing = (str(value) if names is None else names[value] for value in (values[0], values[other]))
            raise ConfigError(
                f"{CALLS[call]}: the ranks of the EP group disagree on {meaning}: rank {ranks[0]} has {one}, rank "
                f"{ranks[other]} has {differing}. Give every rank the same value and call the operations in the same "
                "order on every rank."
            )


def check_async(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise ValueError(
            "async_finish and return_recv_hook are both True; a call completes by its event or by its hook."
        )


def row_format_of(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> int:
    """The index in FORMATS of what the arguments ask for."""
    if not use_fp8:
        return AS_GIVEN
    if use_ue8m0 and not round_scale:
        raise ValueError(
            "use_ue8m0=True was given without round_scale=True; UE8M0 scales are powers of two, give both."
        )
    return FP8_UE8M0 if use_ue8m0 else FP8_ROUNDED if round_scale else FP8


def check_request(
    x: Tensor, topk_idx: Tensor, num_max: int, placement: ExpertPlacement, row_format: int
) -> DispatchRequest:
    """A checked dispatch: T at most M, H that fits the format. Reads no ids."""
    check_tensor(x, "x")
    request = dispatch_request(
        x.detach(), topk_idx, None, placement, "expert_major", alignment=1, max_rows=None, num_channels=1
    )
    allowed = ROW_DTYPES if row_format == AS_GIVEN else (torch.bfloat16,)
    if x.dtype not in allowed:
        beside = "" if row_format == AS_GIVEN else " with use_fp8=True"
        raise TypeError(f"x is {x.dtype}; low-latency rows{beside} are {', '.join(map(str, allowed))}.")
    check_int(num_max, "num_max_dispatch_tokens_per_rank")
    if num_max < 1:
        raise ValueError(f"num_max_dispatch_tokens_per_rank is {num_max}; it must be at least 1.")
    num_tokens, hidden = x.shape
    if num_tokens > num_max:
        raise ValueError(
            f"x has T = {num_tokens} tokens, but num_max_dispatch_tokens_per_rank is {num_max}; give at most as many, "
            "or raise it on every rank."
        )
    multiple = {AS_GIVEN: 1, FP8_UE8M0: UE8M0_PER_WORD * BLOCK_ELEMS}.get(row_format, BLOCK_ELEMS)
    if hidden % multiple:
        raise ValueError(
            f"x has H = {hidden}; {FORMATS[row_format]} need H to be a multiple of {multiple}. Pad the rows, or give "
            "use_fp8=False."
        )
    return replace(request, grad_enabled=True)  # no call of the low-latency mode has a backward


def low_latency_request(
    x: Tensor, topk_idx: Tensor, num_max: int, placement: ExpertPlacement, row_format: int
) -> DispatchRequest:
    """A checked dispatch, and no expert is named more than M times."""
    request = check_request(x, topk_idx, num_max, placement, row_format)
    used = topk_idx[(topk_idx >= 0) & (topk_idx < placement.num_experts)]
    named_E = torch.bincount(used.long(), minlength=placement.num_experts)
    most = int(named_E.argmax())
    if int(named_E[most]) > num_max:
        raise ValueError(
            f"topk_idx names expert {most} {int(named_E[most])} times, but num_max_dispatch_tokens_per_rank is "
            f"{num_max}, and so many rows of one rank have a place there. Name an expert once a token, or raise it on "
            "every rank."
        )
    return request


def without_experts(topk_idx: Tensor, placement: ExpertPlacement, closed: Collection[int]) -> Tensor:
    """The ids, -1 where the expert lies on one of the `closed` ranks."""
    if not closed:
        return topk_idx
    experts = [expert for rank in closed for expert in placement.experts_of(rank)]
    return topk_idx.masked_fill(torch.isin(topk_idx, torch.tensor(experts, device=topk_idx.device)), -1)


def check_combine(handle: LowLatencyHandle, x: Tensor, topk_idx: Tensor, out: Tensor | None, use_logfmt: bool) -> None:
    if use_logfmt:
        raise ValueError("use_logfmt=True was given; this version sends rows as they are only. Leave it out.")
    check_tensor(x, "x")
    if x.dtype not in ROW_DTYPES:
        raise TypeError(
            f"x is {x.dtype}; low-latency combine takes {', '.join(map(str, ROW_DTYPES))}. Convert it first."
        )
    if x.shape != handle.shape or x.device != handle.src_info.device:
        raise ValueError(
            f"x is {list(x.shape)} on {x.device}, but the handle stands for rows {list(handle.shape)} on "
            f"{handle.src_info.device}; give the shape of what the dispatch returned."
        )
    check_tensor(topk_idx, "topk_idx")
    on_node = isinstance(handle.routing, NodeRouting)  # which holds what the ids say; nothing is read of the device
    same_shape = topk_idx.shape == handle.topk_idx.shape
    if not same_shape or not (on_node or bool((topk_idx == handle.topk_idx).all())):
        raise ValueError("topk_idx differs from the ids that made the handle; give those of its dispatch.")
    if out is None:
        return
    check_tensor(out, "out")
    expected = (handle.routing.num_tokens, handle.hidden)
    if out.shape != expected or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}; it must be {x.dtype} {list(expected)} on "
            f"{x.device}."
        )


def slot_weights(topk_weights: Tensor, topk_idx: Tensor) -> Tensor:
    """The weights in float32, one a slot."""
    weights = as_weights(topk_weights, torch.float32, "topk_weights").detach()
    if weights.shape != topk_idx.shape or weights.device != topk_idx.device:
        raise ValueError(
            f"topk_weights is {list(weights.shape)} on {weights.device}, topk_idx {list(topk_idx.shape)} on "
            f"{topk_idx.device}; they must be alike."
        )
    return weights


def check_stats(stats: Tensor | None, name: str, size: int, dtype: str, device: torch.device | None = None) -> None:
    """[size] numbers that are added to or written; contiguous and on `device`, where a kernel does that."""
    if stats is None:
        return
    check_tensor(stats, name)
    if stats.dtype != getattr(torch, dtype) or stats.shape != (size,):
        raise ValueError(f"{name} is {stats.dtype} {list(stats.shape)}; it must be {dtype} [{size}].")
    if device is not None and (stats.device != device or not stats.is_contiguous()):
        raise ValueError(
            f"{name} is on {stats.device} with a stride of {stats.stride(0)}; a kernel adds to it, so it must be "
            f"contiguous on {device}."
        )
