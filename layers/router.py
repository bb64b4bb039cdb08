"""Top-k router: which experts a token goes to and with which weight.

Scores are float32 (float64 for float64 x, where the choice goes by their float32 values). The expert bias and the
groups decide only which experts are chosen; the weights come from the unbiased scores and are differentiable.
Selection is exact and deterministic (`moe_ep.layers.topk`), so recompute, other ranks and other devices choose the same
experts from the same logits.

Counting and auxiliary losses ride on the backward of the weights (`moe_ep.layers.balance`): nothing else to call.

Letters: T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from moe_ep.autograd import ops
from moe_ep.config import MoEConfig
from moe_ep.layers import balance, routing_kernel
from moe_ep.layers.capacity import apply_capacity
from moe_ep.layers.router_gemm import router_logits
from moe_ep.layers.routing_kernel import Routing
from moe_ep.layers.topk import group_mask, group_scores, topk_lowest_index

if TYPE_CHECKING:
    from moe_ep.buffer import Buffer

_NORMALIZE_EPS: Final = 1e-20  # keeps 0/0 away when every chosen score underflows; representable in float32 only


class TopKRouter(nn.Module):
    """Router of a mixture-of-experts layer; usable alone.

    Attributes:
        weight: parameter [E, H].
        expert_bias: buffer [E] float32, persistent, or None (`router.expert_bias`). It stays float32 when the module
            is cast to another dtype.
        tokens_per_expert: buffer [E] int64, not persistent: pairs routed since the last `update_expert_bias`, counted
            once per backward, before capacity drops. With `router.expert_bias` a frozen router has a backward too, to
            count in; call `eval()` on it to leave it out.
        last_counts: [E] int64, pairs per expert of the last forward (any mode), before capacity drops.
        last_dropped: scalar int64, pairs dropped by the capacity limit in the last forward.
        last_losses: name ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss") to detached scalar, coefficient
            included, of the last forward that trained; overwritten, never summed.
        aux_loss_scale: gradient given to the sum of the auxiliary losses, read at forward; default 1.0. Set it to
            whatever the main loss is multiplied by: 1 / accumulation steps, or the loss scale.

    Forwards in eval mode or under `torch.no_grad()` compute no auxiliary loss and count nothing into
    `tokens_per_expert`.
    """

    expert_bias: Tensor | None
    tokens_per_expert: Tensor

    def __init__(self, config: MoEConfig, buffer: Buffer | None = None) -> None:
        """Build the router.

        Args:
            config: the layer's configuration; only its sizes and `config.router` are read.
            buffer: sums the counts of the global auxiliary loss over the EP group; None = this rank alone.
        """
        super().__init__()
        self.config = config
        self.options = config.router
        self.num_experts = config.num_experts
        self.buffer = buffer
        self.aux_loss_scale = 1.0
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if self.options.expert_bias else None
        self.register_buffer("expert_bias", bias)
        counts = torch.zeros(config.num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        # Not a parameter: it only brings a frozen router into the graph. Made on the CPU whatever the default device.
        self._anchor = None if bias is None else torch.empty(0, device="cpu", requires_grad=True)
        self.last_counts = torch.zeros_like(counts)
        self.last_dropped = torch.zeros((), dtype=torch.int64, device=counts.device)
        self.last_losses: dict[str, Tensor] = {}
        self.reset_parameters()
        self._warn_if_weights_are_constant()

    def reset_parameters(self) -> None:
        """Draw the weight from normal(0, init_std); set bias and counts to zero."""
        nn.init.normal_(self.weight, mean=0.0, std=self.config.init_std)
        with torch.no_grad():
            self.tokens_per_expert.zero_()
            if self.expert_bias is not None:
                self.expert_bias.zero_()

    def forward(
        self, x_TH: Tensor, padding_mask: Tensor | None = None, sequence_idx: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose K experts per token.

        Args:
            x_TH: [T, H], any floating dtype; T may be 0.
            padding_mask: [T] bool, True = padding: ids -1, weight 0, no gradient, counted nowhere.
            sequence_idx: [T] int64, number of the sequence of each token; only the per-sequence loss reads it.
                None = one sequence.

        Returns:
            (topk_idx_TK, topk_weights_TK): int64, best first, -1 where the slot is padding or dropped; float32 (float64
            for float64 x).

        Raises:
            ValueError: a shape, dtype or device does not fit.
        """
        self._check_input(x_TH, padding_mask, sequence_idx)
        with torch.autocast(device_type=x_TH.device.type, enabled=False):
            if padding_mask is not None:  # padding may hold anything, NaN too: it is read as 0 and gets no gradient
                x_TH = x_TH.masked_fill(padding_mask[:, None], 0.0)
            logits_TE = router_logits(x_TH, self.weight)
            trains = self.training and torch.is_grad_enabled()
            routing = self._route(logits_TE, padding_mask, needs_probs=trains and self._has_balance_loss())
            topk_idx_TK, topk_weights_TK, _, counts_E = routing
            aux_loss = self._aux_loss(logits_TE, routing, padding_mask, sequence_idx) if trains else None
            self.last_counts = counts_E
            if self.options.capacity_factor is not None:
                topk_idx_TK, topk_weights_TK, self.last_dropped = apply_capacity(
                    topk_idx_TK,
                    topk_weights_TK,
                    num_experts=self.num_experts,
                    capacity_factor=self.options.capacity_factor,
                    drop_policy=self.options.drop_policy,
                )
            if trains:
                topk_weights_TK = balance.carry_aux_loss(
                    topk_weights_TK, aux_loss, counts_E, self.aux_loss_scale, self._accumulate_counts, self._anchor
                )
            return topk_idx_TK, topk_weights_TK

    @torch.no_grad()
    def update_expert_bias(self, all_reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        """Take one step of auxiliary-loss-free balancing and start counting anew.

        Call it once after the optimizer step. Without `router.expert_bias` it only resets the counts.

        Args:
            all_reduce: sums an int64 tensor over every rank whose tokens count; None = this rank alone. It is called
                only with `router.expert_bias`, then on every rank.
        """
        if self.expert_bias is not None:
            counts_E = self.tokens_per_expert.clone()
            if all_reduce is not None:
                counts_E = all_reduce(counts_E)
            balance.step_expert_bias(self.expert_bias, counts_E, self.options.bias_update_rate)
        self.tokens_per_expert.zero_()

    def extra_repr(self) -> str:
        """Sizes and scoring, for print(module)."""
        return (
            f"hidden_size={self.config.hidden_size}, num_experts={self.num_experts}, topk={self.options.topk}, "
            f"score_function={self.options.score_function}"
        )

    def _has_balance_loss(self) -> bool:
        options = self.options
        return bool(options.aux_loss_coef or options.seq_aux_loss_coef or options.global_aux_loss_coef)

    def _route(self, logits_TE: Tensor, padding_mask: Tensor | None, needs_probs: bool) -> Routing:
        """Ids, weights, probabilities and counts: one kernel on CUDA, else step by step."""
        if routing_kernel.serves(logits_TE, self.options):
            return routing_kernel.route(logits_TE, self.expert_bias, padding_mask, self.options, needs_probs)
        scores_TE = self._scores(logits_TE)
        topk_idx_TK = self._choose(scores_TE)
        topk_weights_TK = self._weights(scores_TE, topk_idx_TK)
        probs_TE = self._probs(logits_TE, scores_TE) if needs_probs else None
        if padding_mask is not None:
            topk_idx_TK = topk_idx_TK.masked_fill(padding_mask[:, None], -1)
            topk_weights_TK = topk_weights_TK.masked_fill(padding_mask[:, None], 0.0)
            probs_TE = None if probs_TE is None else probs_TE.masked_fill(padding_mask[:, None], 0.0)
        counts_E = balance.expert_counts(topk_idx_TK, self.num_experts)
        return Routing(topk_idx_TK, topk_weights_TK, probs_TE, counts_E)

    def _scores(self, logits_TE: Tensor) -> Tensor:
        """What experts are chosen by and weights are made of; logits where softmax comes after the choice."""
        if self.options.score_function == "sigmoid":
            return torch.sigmoid(logits_TE)
        return torch.softmax(logits_TE, dim=-1) if self.options.pre_softmax else logits_TE

    def _choose(self, scores_TE: Tensor) -> Tensor:
        options = self.options
        choice_TE = scores_TE.detach().float()
        if self.expert_bias is not None:
            choice_TE = choice_TE + self.expert_bias
        mask_TE = None
        if options.num_groups is not None and options.group_topk is not None:
            num_best = max(options.topk // options.group_topk, 1)
            scores_TG = group_scores(choice_TE, options.num_groups, options.group_score, num_best)
            mask_TE = group_mask(scores_TG, options.group_topk, self.num_experts)
        return topk_lowest_index(choice_TE, options.topk, mask_TE)

    def _weights(self, scores_TE: Tensor, topk_idx_TK: Tensor) -> Tensor:
        weights_TK = scores_TE.gather(1, topk_idx_TK)
        if self.options.score_function == "softmax" and not self.options.pre_softmax:
            weights_TK = torch.softmax(weights_TK, dim=-1)
        if self.options.normalize:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + _NORMALIZE_EPS)
        return weights_TK * self.options.scaling_factor

    def _aux_loss(
        self,
        logits_TE: Tensor,
        routing: Routing,
        padding_mask: Tensor | None,
        sequence_idx: Tensor | None,
    ) -> Tensor | None:
        """Sum of the auxiliary losses that are switched on; their values go to `last_losses`."""
        options = self.options
        topk_idx_TK, _, probs_TE, counts_E = routing
        losses: dict[str, Tensor] = {}
        if probs_TE is not None:
            if options.aux_loss_coef:
                losses["aux_loss"] = balance.batch_aux_loss(probs_TE, counts_E, options.topk, options.aux_loss_coef)
            if options.seq_aux_loss_coef:
                losses["seq_aux_loss"] = balance.sequence_aux_loss(
                    probs_TE, topk_idx_TK, sequence_idx, options.topk, options.seq_aux_loss_coef
                )
            if options.global_aux_loss_coef:
                all_reduce = None if self.buffer is None else functools.partial(ops.all_reduce, self.buffer)
                losses["global_aux_loss"] = balance.global_aux_loss(
                    probs_TE, counts_E, options.topk, options.global_aux_loss_coef, all_reduce
                )
        if options.z_loss_coef:
            valid_T = None if padding_mask is None else ~padding_mask
            losses["z_loss"] = balance.z_loss(logits_TE, valid_T, options.z_loss_coef)
        self.last_losses = {name: loss.detach() for name, loss in losses.items()}
        return torch.stack(list(losses.values())).sum() if losses else None

    def _probs(self, logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
        """Scores whose rows sum to 1, over all experts."""
        if self.options.score_function == "sigmoid":
            return scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + _NORMALIZE_EPS)
        return scores_TE if self.options.pre_softmax else torch.softmax(logits_TE, dim=-1)

    def _accumulate_counts(self, counts_E: Tensor) -> None:
        self.tokens_per_expert.add_(counts_E)

    def _check_input(self, x_TH: Tensor, padding_mask: Tensor | None, sequence_idx: Tensor | None) -> None:
        if x_TH.dim() != 2 or x_TH.shape[1] != self.config.hidden_size or not x_TH.is_floating_point():
            raise ValueError(
                f"The router takes x of shape [tokens, {self.config.hidden_size}] and a floating dtype, but was given "
                f"{list(x_TH.shape)} {x_TH.dtype}; flatten the leading dimensions or correct hidden_size."
            )
        if x_TH.device != self.weight.device:
            raise ValueError(
                f"x is on {x_TH.device}, but the router is on {self.weight.device}; move one of them to the other."
            )
        expected = {"padding_mask": (padding_mask, torch.bool), "sequence_idx": (sequence_idx, torch.int64)}
        for name, (tensor, dtype) in expected.items():
            if tensor is None:
                continue
            if tensor.shape != x_TH.shape[:1] or tensor.dtype != dtype or tensor.device != x_TH.device:
                raise ValueError(
                    f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, but must be one {dtype} value "
                    f"per token: [{x_TH.shape[0]}] on {x_TH.device}; give it in that form or leave it out."
                )

    def _warn_if_weights_are_constant(self) -> None:
        options = self.options
        post_softmax = options.score_function == "softmax" and not options.pre_softmax
        if options.topk == 1 and (options.normalize or post_softmax):
            setting = "router.normalize = true" if options.normalize else "router.pre_softmax = false"
            warnings.warn(
                f"router.topk = 1 together with {setting} makes every routing weight constant, so the main loss gives "
                "the router no gradient; switch that setting off, or take topk >= 2.",
                stacklevel=3,
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        """Casts reach the weight but not the bias: steps of 1e-3 would vanish in bfloat16. Counts move along."""
        kept, was_meta = self.expert_bias, self.tokens_per_expert.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if kept is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = kept.to(self.expert_bias.device)
        device = self.tokens_per_expert.device
        if was_meta and not self.tokens_per_expert.is_meta:  # memory that nothing has written, and no file holds it
            self.tokens_per_expert.zero_()
        self.last_counts, self.last_dropped = (
            torch.zeros_like(last, device=device) if last.is_meta else last.to(device)
            for last in (self.last_counts, self.last_dropped)
        )
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Loading with assign=True must not bring in a bias of another dtype either."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = self.expert_bias.to(torch.float32)
