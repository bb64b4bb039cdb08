"""From a map of which experts each token has, as Megatron's router makes it, to the slots that dispatch takes.

On CUDA one kernel each way (csrc/layer/slots_of_map.h), else PyTorch's operations.

Letters: T tokens, E experts, K slots per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep.autograd import ops
from moe_ep.autograd.once import once_differentiable
from moe_ep.layers import kernels


def slots_of_map(map_TE: Tensor, probs_TE: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """The experts of each token in ascending order, and their probabilities.

    Args:
        map_TE: [T, E] bool, which experts a token has: at most K of them.
        probs_TE: [T, E] floating point.
        num_slots: K.

    Returns:
        [T, K] int64, -1 in the slots that are left; [T, K], dtype of probs, 0 in those, differentiable.
        [0 1 0 1] with K = 3 gives [1, 3, -1].
    """
    if kernels.serve(probs_TE, torch.float32) and map_TE.dtype == torch.bool and not ops.is_watched():
        idx_TK, weights_TK = _SlotsOfMap.apply(map_TE, probs_TE, num_slots)  # type: ignore[no-untyped-call]
        return idx_TK, weights_TK
    idx_TK = expert_slots(map_TE, num_slots)
    weights_TK = probs_TE.gather(1, idx_TK.clamp(min=0))
    return idx_TK, weights_TK.masked_fill(idx_TK < 0, 0)


def expert_slots(map_TE: Tensor, num_slots: int) -> Tensor:
    """The ids alone, by PyTorch's operations."""
    num_experts = map_TE.shape[1]
    # The largest keys are the first experts; no order among equals is asked of topk, because only zeros are equal.
    keys_E = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=map_TE.device)
    keys_TK = torch.topk(map_TE * keys_E, num_slots, dim=1).values.long()
    return torch.where(keys_TK > 0, num_experts - keys_TK, -1)


class _SlotsOfMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, map_TE: Tensor, probs_TE: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
        num_tokens, num_experts = map_TE.shape
        map_TE, probs_TE = map_TE.contiguous(), probs_TE.contiguous()
        idx_TK = torch.empty(num_tokens, num_slots, dtype=torch.int64, device=map_TE.device)
        weights_TK = probs_TE.new_empty(num_tokens, num_slots)
        device, stream = kernels.launch_on(probs_TE)
        with device:
            _native.require().slots_of_map(
                map=map_TE.data_ptr(),
                probs=probs_TE.data_ptr(),
                idx=idx_TK.data_ptr(),
                weights=weights_TK.data_ptr(),
                num_tokens=num_tokens,
                num_experts=num_experts,
                num_slots=num_slots,
                num_sms=kernels.ALL_SMS,
                stream=stream,
            )
        ctx.num_experts = num_experts
        ctx.save_for_backward(idx_TK)
        ctx.mark_non_differentiable(idx_TK)
        return idx_TK, weights_TK

    @staticmethod
    @once_differentiable("MoELayer")
    def backward(ctx: Any, _: None, grad_weights_TK: Tensor) -> tuple[None, Tensor, None]:
        (idx_TK,) = ctx.saved_tensors
        num_tokens, num_slots = idx_TK.shape
        grad_weights_TK = grad_weights_TK.contiguous()
        grad_probs_TE = grad_weights_TK.new_empty(num_tokens, ctx.num_experts)
        device, stream = kernels.launch_on(grad_weights_TK)
        with device:
            _native.require().slots_of_map_backward(
                idx=idx_TK.data_ptr(),
                grad_weights=grad_weights_TK.data_ptr(),
                grad_probs=grad_probs_TE.data_ptr(),
                num_tokens=num_tokens,
                num_experts=ctx.num_experts,
                num_slots=num_slots,
                num_sms=kernels.ALL_SMS,
                stream=stream,
            )
        return None, grad_probs_TE, None
