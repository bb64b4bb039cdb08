"""A handle as DeepEP V1's intranode tuple, for callers that index or unpack it.

DeepEP divides the tokens of a source into C channels, contiguous ranges of ceil(T / C) tokens. Here that division has
no meaning of its own; it is worked out only when someone looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moe_ep.handle import DispatchHandle


def v1_tuple(handle: DispatchHandle) -> tuple[Tensor, ...]:
    """The six tensors of DeepEP V1, W ranks, C channels, S rows received, T tokens of this rank.

    Returns:
        rank_prefix_matrix int32 [W, W]: rows to rank j from the ranks up to and with i, at [i, j];
        channel_prefix_matrix int32 [W, C]: rows sent to a rank up to and with a channel;
        recv_channel_prefix_matrix int32 [W, C]: where a channel begins among the rows of a source;
        recv_src_idx int32 [S]: source token of each row;
        is_token_in_rank bool [T, W];
        send_head int32 [T, W]: a row's place in its (channel, rank) queue, -1 without one.

    Example: 4 tokens, C = 2, rank 1 gets tokens 0, 1 and 3. Its channel_prefix_matrix row is [2, 3], and its column of
    send_head is [0, 1, -1, 0].
    """
    world, device = len(handle.ranks), handle.send_token.device
    rows_WW = torch.tensor(handle.rank_rows, dtype=torch.int32, device=device).view(world, world)
    in_rank_TW = torch.stack([(handle.slot_rank == rank).any(dim=1) for rank in range(world)], dim=1)
    channel_T = _channel(torch.arange(handle.num_tokens, device=device), handle.num_tokens, handle.num_channels)
    channels = torch.arange(handle.num_channels, device=device)
    sent_WC = torch.stack([(in_rank_TW & (channel_T == c).unsqueeze(1)).sum(dim=0) for c in channels], dim=1)

    received = []
    for tokens, source_tokens in zip(
        torch.split(handle.recv_token, list(handle.recv_counts)), handle.rank_tokens, strict=True
    ):
        channel_S = _channel(tokens.long(), source_tokens, handle.num_channels)
        received.append(torch.stack([(channel_S < c).sum() for c in channels]))

    before_TW = torch.cumsum(in_rank_TW.int(), dim=0) - 1
    begin_WC = torch.cumsum(sent_WC, dim=1) - sent_WC
    head_TW = (before_TW - begin_WC.t()[channel_T]).masked_fill(~in_rank_TW, -1)
    return (
        torch.cumsum(rows_WW, dim=0).int(),
        torch.cumsum(sent_WC, dim=1).int(),
        torch.stack(received).int(),
        handle.recv_token,
        in_rank_TW,
        head_TW.int(),
    )


def _channel(token: Tensor, num_tokens: int, num_channels: int) -> Tensor:
    """The channel of each token: contiguous ranges of ceil(T / C)."""
    return torch.div(token, max(1, -(-num_tokens // num_channels)), rounding_mode="floor")
