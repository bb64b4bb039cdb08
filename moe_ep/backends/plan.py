"""The local part of planning a dispatch: checking the ids that leave, laying out the rows that arrived."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_ep.backends.base import DispatchPlan, DispatchRequest
from moe_ep.backends.rows import resize, take
from moe_ep.handle import DispatchHandle
from moe_ep.layout import expert_layout, find_bad_id


def bad_id_sentence(token: int, slot: int, value: int, num_experts: int) -> str:
    """What every backend says of an id that is none."""
    return (
        f"topk_idx[{token}, {slot}] is {value}; an id must lie in [-1, {num_experts}) "
        f"(num_experts = {num_experts}, -1 = no expert). Check the router that made it."
    )


def checked_ids(request: DispatchRequest, faults: list[str]) -> tuple[Tensor, Exception | None]:
    """The ids, with the bad ones turned to -1, and the error to raise for them; with `max_rows` it goes to `faults`."""
    ids, num_experts = request.topk_idx, request.placement.num_experts
    bad = find_bad_id(ids, num_experts)
    if bad is None:
        return ids, None
    sentence = bad_id_sentence(*bad, num_experts)
    ids = ids.masked_fill((ids < -1) | (ids >= num_experts), -1)
    if request.max_rows is None:
        return ids, ValueError(sentence)
    faults.append(sentence)
    return ids, None


def finish_plan(
    handle: DispatchHandle,
    request: DispatchRequest,
    idx_SK: Tensor,
    weights_SK: Tensor | None,
    faults: list[str],
) -> DispatchPlan:
    """Lays out the rows that are handed out, and their ids and weights, from those of the compact rows.

    Args:
        handle: complete but for the rows handed out.
        request: the call.
        idx_SK: [S, K] int64 local ids.
        weights_SK: [S, K] weights, or None.
        faults: takes the sentence of a call that received more than `max_rows`.
    """
    num_local = len(request.placement.experts_of(handle.rank))
    experts = expert_layout(idx_SK, num_local, request.alignment)
    expert_major = request.layout == "expert_major"
    row_idx, row_weights, row_pair = idx_SK, weights_SK, handle.row_pair
    if expert_major:
        row_pair = experts.row_pair
        row_idx = take(idx_SK.reshape(-1), row_pair, -1)
        row_weights = None if weights_SK is None else take(weights_SK.reshape(-1), row_pair, 0)
    num_rows, overflowed = row_idx.shape[0], False
    if request.max_rows is not None:
        overflowed = num_rows > request.max_rows
        if overflowed:
            faults.append(
                f"dispatch received {num_rows} rows on EP rank {handle.rank}, max_rows is {request.max_rows}; its "
                f"outputs are NaN. Give max_rows of at least {num_rows}, or leave it out."
            )
        num_rows = request.max_rows
        row_idx = resize(row_idx, num_rows, -1)
        row_pair = resize(row_pair, num_rows, -1) if expert_major else row_pair
        if row_weights is not None:
            row_weights = resize(row_weights, num_rows, 0)
            if overflowed:
                row_weights = torch.full_like(row_weights, float("nan"))
    offsets = torch.zeros(num_local + 1, dtype=torch.int32, device=idx_SK.device)
    offsets[1:] = torch.cumsum(experts.padded_counts, 0)
    if expert_major and request.max_rows is not None:
        offsets.clamp_(max=request.max_rows)  # where more came than there are rows, no GEMM may be sent behind them
    pairs = tuple(int((ids >= 0).sum()) for ids in torch.split(idx_SK, list(handle.recv_counts)))
    handle = replace(handle, num_rows=num_rows, overflowed=overflowed, row_pair=row_pair, recv_pairs=pairs)
    waits = request.max_rows is None
    return DispatchPlan(
        handle=handle,
        row_idx=row_idx.to(request.topk_idx.dtype),
        row_weights=row_weights,
        tokens_per_expert=experts.padded_counts.tolist() if waits else None,
        real_tokens_per_expert=experts.real_counts.tolist() if waits else None,
        expert_counts=experts.real_counts.int(),
        expert_offsets=offsets,
    )
