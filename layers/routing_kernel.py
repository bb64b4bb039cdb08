"""From logits to experts and weights in one CUDA kernel, and its gradient in another (csrc/layer/topk.h).

The plain formula is in `moe_ep.layers.router`, which decides where these two take its place. Ordinary eager calls go
through an autograd.Function; where single operations are watched (torch.compile, selective checkpointing), the same
launches are custom ops.

Letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep._native.arguments import address
from moe_ep.autograd import ops
from moe_ep.autograd.once import once_differentiable
from moe_ep.config import RouterConfig
from moe_ep.layers import kernels

_MAX_EXPERTS: Final = 1024  # as in csrc/layer/topk.h
_MAX_TOPK: Final = 64


class Routing(NamedTuple):
    """What a router's choice consists of.

    Attributes:
        topk_idx: [T, K] int64, best first, -1 for padding.
        topk_weights: [T, K], differentiable, 0 for padding.
        probs: [T, E], differentiable, rows sum to 1 (0 for padding); None where nobody asked.
        counts: [E] int64, pairs of each expert.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    probs: Tensor | None
    counts: Tensor


class _Scoring(NamedTuple):
    """The settings that both directions need; see RouteOptions in csrc/layer/topk.h."""

    score_function: str
    num_topk: int
    normalize: bool
    scaling_factor: float


class _Groups(NamedTuple):
    """The settings that the choice alone needs; num_groups = 0 for none."""

    num_groups: int
    group_topk: int
    num_best: int


def serves(logits_TE: Tensor, options: RouterConfig) -> bool:
    """Whether the kernels take these logits with these settings."""
    fits = 0 < logits_TE.shape[1] <= _MAX_EXPERTS and 0 < options.topk <= _MAX_TOPK
    return fits and kernels.serve(logits_TE, torch.float32)


def route(
    logits_TE: Tensor,
    expert_bias: Tensor | None,
    padding_mask: Tensor | None,
    options: RouterConfig,
    needs_probs: bool,
) -> Routing:
    """Choose K experts per token by the rules of `moe_ep.layers.topk` and weigh them.

    Args:
        logits_TE: [T, E] float32 on CUDA; T may be 0.
        expert_bias: [E] float32, added for choosing only; None = none.
        padding_mask: [T] bool, True = padding; None = no padding.
        options: the router's settings.
        needs_probs: whether `Routing.probs` is wanted.

    Returns:
        The choice; gradients flow from weights and probabilities to the logits.
    """
    softmax = "softmax" if options.pre_softmax else "softmax_of_chosen"
    function = softmax if options.score_function == "softmax" else "sigmoid"
    scoring = _Scoring(function, options.topk, options.normalize, options.scaling_factor)
    groups = _Groups(0, 0, 0)
    if options.num_groups is not None and options.group_topk is not None:
        best = {"top2": 2, "max": 1, "megatron": max(options.topk // options.group_topk, 1)}
        groups = _Groups(options.num_groups, options.group_topk, best[options.group_score])
    if ops.is_watched():
        chosen = route_op(logits_TE, expert_bias, padding_mask, needs_probs, *scoring, *groups)
    else:
        chosen = _Route.apply(logits_TE, expert_bias, padding_mask, needs_probs, scoring, groups)  # type: ignore[no-untyped-call]
    topk_idx, topk_weights, probs, counts = chosen
    return Routing(topk_idx, topk_weights, probs if needs_probs else None, counts)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        expert_bias: Tensor | None,
        padding_mask: Tensor | None,
        needs_probs: bool,
        scoring: _Scoring,
        groups: _Groups,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        outputs = _launch(logits_TE, expert_bias, padding_mask, needs_probs, scoring, groups)
        ctx.scoring = scoring
        ctx.save_for_backward(logits_TE, outputs[0])
        ctx.mark_non_differentiable(outputs[0], outputs[3])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable("TopKRouter")
    def backward(
        ctx: Any, _grad_idx: None, grad_weights: Tensor | None, grad_probs: Tensor | None, _grad_counts: None
    ) -> tuple[Tensor | None, None, None, None, None, None]:
        logits_TE, topk_idx_TK = ctx.saved_tensors
        grad_TE = _launch_backward(logits_TE, topk_idx_TK, grad_weights, grad_probs, ctx.scoring)
        return grad_TE, None, None, None, None, None  # no gradient: bias, mask, settings


@torch.library.custom_op("moe_ep::route", mutates_args=(), device_types="cuda")
def route_op(
    logits: Tensor,
    expert_bias: Tensor | None,
    padding_mask: Tensor | None,
    needs_probs: bool,
    score_function: str,
    num_topk: int,
    normalize: bool,
    scaling_factor: float,
    num_groups: int,
    group_topk: int,
    num_best: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, weights, probabilities (empty where not needed) and counts."""
    scoring = _Scoring(score_function, num_topk, normalize, scaling_factor)
    groups = _Groups(num_groups, group_topk, num_best)
    return _launch(logits, expert_bias, padding_mask, needs_probs, scoring, groups)


@route_op.register_fake
def _route_fake(
    logits: Tensor,
    expert_bias: Tensor | None,
    padding_mask: Tensor | None,
    needs_probs: bool,
    score_function: str,
    num_topk: int,
    normalize: bool,
    scaling_factor: float,
    num_groups: int,
    group_topk: int,
    num_best: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(logits, num_topk, needs_probs)


@torch.library.custom_op("moe_ep::route_backward", mutates_args=(), device_types="cuda")
def route_backward_op(
    logits: Tensor,
    topk_idx: Tensor,
    grad_weights: Tensor | None,
    grad_probs: Tensor | None,
    score_function: str,
    num_topk: int,
    normalize: bool,
    scaling_factor: float,
) -> Tensor:
    """The gradient of the logits, [T, E]."""
    scoring = _Scoring(score_function, num_topk, normalize, scaling_factor)
    return _launch_backward(logits, topk_idx, grad_weights, grad_probs, scoring)


@route_backward_op.register_fake
def _route_backward_fake(
    logits: Tensor,
    topk_idx: Tensor,
    grad_weights: Tensor | None,
    grad_probs: Tensor | None,
    score_function: str,
    num_topk: int,
    normalize: bool,
    scaling_factor: float,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    ctx.needs_probs, ctx.scoring = inputs[3], _Scoring(*inputs[4:8])
    ctx.save_for_backward(inputs[0], output[0])


def _backward(
    ctx: Any, _grad_idx: Any, grad_weights: Tensor | None, grad_probs: Tensor | None, _grad_counts: Any
) -> tuple[Tensor | None, ...]:
    logits_TE, topk_idx_TK = ctx.saved_tensors
    grad_probs = grad_probs if ctx.needs_probs else None
    grad_TE = route_backward_op(logits_TE, topk_idx_TK, grad_weights, grad_probs, *ctx.scoring)
    return grad_TE, *[None] * 10  # no gradient: bias, mask, settings


route_op.register_autograd(_backward, setup_context=_setup)


def _outputs(logits_TE: Tensor, topk: int, needs_probs: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for ids, weights, probabilities and counts."""
    num_tokens, num_experts = logits_TE.shape
    return (
        logits_TE.new_empty((num_tokens, topk), dtype=torch.int64),
        logits_TE.new_empty((num_tokens, topk)),
        logits_TE.new_empty((num_tokens, num_experts) if needs_probs else (0, num_experts)),
        logits_TE.new_empty(num_experts, dtype=torch.int64),
    )


def _launch(
    logits_TE: Tensor,
    expert_bias: Tensor | None,
    padding_mask: Tensor | None,
    needs_probs: bool,
    scoring: _Scoring,
    groups: _Groups,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits_TE = logits_TE.contiguous()
    padding_mask = None if padding_mask is None else padding_mask.contiguous()
    expert_bias = None if expert_bias is None else expert_bias.contiguous()
    outputs = _outputs(logits_TE, scoring.num_topk, needs_probs)
    topk_idx_TK, topk_weights_TK, probs_TE, counts_E = outputs
    device, stream = kernels.launch_on(logits_TE)
    with device:
        _native.require().topk_route(
            logits=logits_TE.data_ptr(),
            expert_bias=address(expert_bias),
            padding_mask=address(padding_mask),
            topk_idx=topk_idx_TK.data_ptr(),
            topk_weights=topk_weights_TK.data_ptr(),
            probs=address(probs_TE if needs_probs else None),
            counts=counts_E.data_ptr(),
            num_tokens=logits_TE.shape[0],
            num_experts=logits_TE.shape[1],
            **scoring._asdict(),
            **groups._asdict(),
            num_sms=kernels.ALL_SMS,
            stream=stream,
        )
    return outputs


def _launch_backward(
    logits_TE: Tensor,
    topk_idx_TK: Tensor,
    grad_weights_TK: Tensor | None,
    grad_probs_TE: Tensor | None,
    scoring: _Scoring,
) -> Tensor:
    logits_TE = logits_TE.contiguous()
    grad_TE = torch.empty_like(logits_TE)
    if grad_weights_TK is not None:
        grad_weights_TK = grad_weights_TK.contiguous()
    probs_stride = 0
    if grad_probs_TE is not None:  # one row for all tokens, where it comes from a sum over them
        grad_probs_TE = grad_probs_TE if grad_probs_TE.stride(1) == 1 else grad_probs_TE.contiguous()
        probs_stride = grad_probs_TE.stride(0)
    device, stream = kernels.launch_on(logits_TE)
    with device:
        _native.require().topk_route_backward(
            logits=logits_TE.data_ptr(),
            topk_idx=topk_idx_TK.data_ptr(),
            grad_weights=address(grad_weights_TK),
            grad_probs=address(grad_probs_TE),
            probs_stride=probs_stride,
            grad_logits=grad_TE.data_ptr(),
            num_tokens=logits_TE.shape[0],
            num_experts=logits_TE.shape[1],
            **scoring._asdict(),
            num_sms=kernels.ALL_SMS,
            stream=stream,
        )
    return grad_TE
