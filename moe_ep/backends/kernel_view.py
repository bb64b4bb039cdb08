"""The routing of a handle as the CUDA kernels read it, for handles that another backend made.

The layout of `geometry` is that of csrc/exchange/exchange.h.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_ep._native.exchange import ExchangeKernels
from moe_ep.handle import DispatchHandle


def kernel_view(
    handle: DispatchHandle, kernels: ExchangeKernels, num_local: int, is_padding: Tensor | None = None
) -> DispatchHandle:
    """The handle, with `geometry`, `token_row` and `pair_row`. The host waits where they have to be made.

    Args:
        handle: made by any backend.
        kernels: what will read the view.
        num_local: no fewer than the handle has runs of padding.
        is_padding: [R] bool, expert_major only: the rows that a dispatch fills with zeros; None for all without a pair.
    """
    if handle.geometry.numel():
        return handle
    return replace(
        handle,
        geometry=_geometry(handle, kernels, num_local, is_padding),
        token_row=_token_row(handle),
        pair_row=_pair_row(handle),
    )


def _token_row(handle: DispatchHandle) -> Tensor:
    """[T, W]: the rows that this rank sends to rank j begin behind those of the ranks before it."""
    world = len(handle.ranks)
    token_row = torch.full((handle.num_tokens, world), -1, dtype=torch.int32, device=handle.send_token.device)
    for peer, tokens in enumerate(torch.split(handle.send_token, list(handle.send_counts))):
        before = sum(handle.rank_rows[rank * world + peer] for rank in range(handle.rank))
        token_row[tokens, peer] = before + torch.arange(tokens.numel(), dtype=torch.int32, device=tokens.device)
    return token_row


def _pair_row(handle: DispatchHandle) -> Tensor:
    """[S, K]: the inverse of `row_pair`."""
    if handle.layout == "compact":
        return handle.row_pair.new_empty(0, dtype=torch.int32)
    pairs = handle.row_pair[handle.real_rows]
    pair_row = torch.full((handle.num_compact_rows * handle.num_topk,), -1, dtype=torch.int32, device=pairs.device)
    pair_row[pairs] = handle.real_rows.int()
    return pair_row.view(-1, handle.num_topk)


def _geometry(handle: DispatchHandle, kernels: ExchangeKernels, num_local: int, is_padding: Tensor | None) -> Tensor:
    device = handle.send_token.device
    chunk_rows, first = [], 0
    for source, tokens in enumerate(torch.split(handle.recv_token.long(), list(handle.recv_counts))):
        size = kernels.chunk_tokens(handle.rank_tokens[source])
        starts = torch.arange(kernels.max_chunks + 1, device=device) * size
        chunk_rows.append(first + torch.searchsorted(tokens, starts))
        first += tokens.numel()
    counts, offsets = _experts(handle, num_local, is_padding)
    # Compact rows behind the last received one are padding, which the kernels fill from here on.
    num_rows = handle.num_compact_rows if handle.layout == "compact" else handle.num_rows
    head = [handle.num_compact_rows, num_rows, int(handle.overflowed), 0]
    head += [*handle.rank_tokens, *handle.rank_rows]
    numbers = torch.tensor(head, device=device)
    return torch.cat([numbers, *chunk_rows, offsets, counts]).int()


def _experts(handle: DispatchHandle, num_local: int, is_padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Counts [L] and offsets [L + 1] that put padding where the handle has it.

    The kernels look at them for nothing else, so run i of padding stands for the padding of expert i, whichever expert
    it belongs to; there are no more runs than experts.
    """
    offsets = torch.full((num_local + 1,), handle.num_rows, dtype=torch.int64, device=handle.send_token.device)
    offsets[0] = 0
    counts = torch.zeros_like(offsets[:-1])
    if handle.layout == "compact":
        return counts, offsets
    pads = (handle.row_pair < 0 if is_padding is None else is_padding).int()
    edges = torch.diff(pads, prepend=pads.new_zeros(1), append=pads.new_zeros(1))
    begins, ends = (edges > 0).nonzero()[:, 0], (edges < 0).nonzero()[:, 0]
    num_runs = begins.numel()
    offsets[1 : num_runs + 1] = ends
    counts[:num_runs] = begins - offsets[:num_runs]
    counts[num_runs:] = offsets[num_runs + 1 :] - offsets[num_runs:-1]
    return counts, offsets
