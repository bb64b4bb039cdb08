"""Counts of a routing by a kernel of csrc, without a wait of the host."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep._native import load, require
from moe_ep.placement import ExpertPlacement


def serves(topk_idx: Tensor) -> bool:
    """Whether the kernel can count these ids: on CUDA, where the extension is."""
    return topk_idx.is_cuda and load() is not None


def counted_layout(topk_idx: Tensor, placement: ExpertPlacement, num_sms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens per rank [W] int32, slots per expert [E] int32, which token goes where [T, W] bool.

    Ids outside [-1, E) count as -1. The kernel is csrc/layer/layout_count.h.
    """
    ids, device = topk_idx.contiguous(), topk_idx.device
    num_tokens, num_topk = ids.shape
    per_expert = ids.new_empty(placement.num_experts, dtype=torch.int32)
    per_rank = ids.new_empty(placement.world_size, dtype=torch.int32)
    in_rank_TW = ids.new_empty(num_tokens, placement.world_size, dtype=torch.bool)
    bad_id = ids.new_empty(3, dtype=torch.int64)
    owner, _ = placement.kernel_tables(device)
    require().layout_count(
        topk_idx=ids.data_ptr(),
        idx_bytes=ids.element_size(),
        rank_of_expert=owner.data_ptr(),
        tokens_per_expert=per_expert.data_ptr(),
        tokens_per_rank=per_rank.data_ptr(),
        is_token_in_rank=in_rank_TW.data_ptr(),
        bad_id=bad_id.data_ptr(),
        num_tokens=num_tokens,
        num_topk=num_topk,
        num_experts=placement.num_experts,
        num_ranks=placement.world_size,
        num_sms=num_sms,
        stream=torch.cuda.current_stream(device).cuda_stream,
    )
    return per_rank, per_expert, in_rank_TW
