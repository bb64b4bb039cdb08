"""The two-projection MLP that routed and shared experts have in common.

Letters: L local experts, R rows, H hidden, F ffn width of one expert.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ep.layers import swiglu, weighted_swiglu

Activation = Literal["swiglu", "gelu"]


def input_projection(activation: Activation, ffn_hidden_size: int) -> tuple[str, int]:
    """Name and output width of the first projection: ("gate_up", 2F) for SwiGLU, ("up", F) for GELU."""
    return ("gate_up", 2 * ffn_hidden_size) if activation == "swiglu" else ("up", ffn_hidden_size)


def activate(projected: Tensor, activation: Activation, expert_offsets: Tensor | None = None) -> Tensor:
    """Apply the nonlinearity between the two projections. SwiGLU is one kernel on CUDA where csrc was built.

    Args:
        projected: [R, 2F] for "swiglu" (gate first, then up), [R, F] for "gelu".
        activation: "swiglu" is silu(gate) * up (arXiv:2002.05202); "gelu" is the exact one (erf).
        expert_offsets: None, or [L + 1] int32 on the device: rows behind the last offset do not matter, so that they
            need not be read.

    Returns:
        [R, F], same dtype.
    """
    if activation == "gelu":
        return F.gelu(projected)
    if swiglu.serves(projected):
        return swiglu.swiglu(projected, expert_offsets)
    gate, up = projected.chunk(2, dim=-1)
    return F.silu(gate) * up


def weighted_activate(
    projected_RP: Tensor, row_weights_R: Tensor | None, activation: Activation, expert_offsets: Tensor | None = None
) -> Tensor:
    """`activate` times a weight of each row, with gradients to both. One kernel where `activate` is one.

    Args:
        projected_RP: [R, 2F] or [R, F], as `activate` takes it.
        row_weights_R: [R] float32, or float64 beside float64; its gradient is a sum over F in that dtype. None is
            `activate` alone.
        activation, expert_offsets: as in `activate`; a row behind the last offset gives its weight no gradient.

    Returns:
        [R, F], dtype of projected.
    """
    if row_weights_R is None:
        return activate(projected_RP, activation, expert_offsets)
    if activation == "swiglu" and swiglu.serves(projected_RP) and row_weights_R.dtype == torch.float32:
        return weighted_swiglu.weighted_swiglu(projected_RP, row_weights_R, expert_offsets)
    inner_RF = activate(projected_RP, activation, expert_offsets)
    return (inner_RF.to(row_weights_R.dtype) * row_weights_R[:, None]).to(inner_RF.dtype)


def activation_grad(
    projected_RP: Tensor, row_weights_R: Tensor | None, grad_out_RF: Tensor, activation: Activation
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `weighted_activate(projected, row_weights, activation)`; outside of any graph.

    Args:
        projected_RP: [R, 2F] for "swiglu", [R, F] for "gelu".
        row_weights_R: [R] float32, or None.
        grad_out_RF: [R, F], dtype of projected.

    Returns:
        That of projected, and that of the weights, None without any; like the two.
    """
    if activation == "swiglu" and swiglu.serves(projected_RP):
        if row_weights_R is None:
            return swiglu.gradient(projected_RP, grad_out_RF), None
        return weighted_swiglu.gradient(projected_RP, row_weights_R, grad_out_RF)
    leaves = [tensor.detach().requires_grad_() for tensor in (projected_RP, row_weights_R) if tensor is not None]
    with torch.enable_grad():
        out = weighted_activate(leaves[0], None if row_weights_R is None else leaves[1], activation)
    grad_projected, *grad_weights = torch.autograd.grad(out, leaves, grad_out_RF)
    return grad_projected, grad_weights[0] if grad_weights else None


def mlp(
    x_RH: Tensor, first: Tensor, down_HF: Tensor, activation: Activation, row_weights_R: Tensor | None = None
) -> Tensor:
    """activate(x @ first.T) @ down.T; under autocast the two GEMMs follow it.

    Args:
        x_RH: [R, H]; R may be 0.
        first: [2F, H] for "swiglu", [F, H] for "gelu".
        down_HF: [H, F].
        activation: see `activate`.
        row_weights_R: None, or the weights of `weighted_activate`, by which each result is multiplied.

    Returns:
        [R, H] in the dtype of the GEMMs.
    """
    return F.linear(weighted_activate(F.linear(x_RH, first), row_weights_R, activation), down_HF)
