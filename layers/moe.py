"""`MoELayer`: route, dispatch, run the experts, combine, and add the shared expert.

Letters: T tokens of this rank, H hidden, E experts, K experts a token, R rows for the local experts, W ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ep.autograd.beside import Beside, runs_beside
from moe_ep.autograd.combine import combine
from moe_ep.autograd.combine_fp8 import combine_fp8_grad
from moe_ep.autograd.dispatch import dispatch
from moe_ep.autograd.dispatch_fp8 import Fp8DispatchOutput, dispatch_fp8
from moe_ep.buffer import Buffer
from moe_ep.config import MoEConfig
from moe_ep.errors import ConfigError
from moe_ep.fp8.rows import Fp8Rows
from moe_ep.handle import DispatchOutput
from moe_ep.layers.experts import GroupedExperts
from moe_ep.layers.router import TopKRouter
from moe_ep.layers.shared_experts import SharedExperts, SharedRun


class MoELayer(nn.Module):
    """A Mixture-of-Experts feed-forward layer; every rank of the EP group holds its own share of the experts.

    y = sum_k weight_k * expert_k(x) + shared(x). Auxiliary losses ride on the gradient: there is nothing else to add to
    the loss. Gradients of `experts` already are the sum over the tokens of all ranks of the EP group; those of the
    router and the shared expert are this rank's part, as in any data-parallel module. So a loss that is averaged over
    the W ranks asks for expert gradients divided by W, and for the others to be averaged over the ranks
    (`moe_ep.parallel.reduce_gradients` does both).

    Every rank must call the layer the same number of times, also with no tokens: each call is an exchange.

    Args:
        config: sizes, router, exchange and FP8 settings.
        ep_group: the ranks that share the experts; None for one rank with all experts. Mind that
            `torch.distributed.group.WORLD` is None before `init_process_group`.
        buffer: an exchange to share with other layers of the same `ep_group`; None makes one from `config.ep`.

    Attributes:
        router, experts, shared_experts (None without one): the parts, ordinary modules.
        buffer: the exchange; `buffer.backend_name` says what "auto" chose.

    Raises:
        ConfigError: `config.ep.size` is not the size of `ep_group`, or auto without a group where the launcher's
            WORLD_SIZE is above 1 and `init_process_group` has not run; the backend is missing, or FP8 was asked for
            where it cannot run.
    """

    def __init__(
        self, config: MoEConfig, ep_group: dist.ProcessGroup | None = None, *, buffer: Buffer | None = None
    ) -> None:
        super().__init__()
        _check_size(config, ep_group)
        self.config = config
        _check_buffer(buffer, ep_group)
        self.buffer = buffer or Buffer(
            ep_group,
            backend=config.ep.backend,
            num_sms=config.ep.comm_sms,
            timeout_secs=config.ep.timeout_secs,
            ranks_per_node=config.ep.ranks_per_node,
            hop=config.ep.hop,
        )
        placement = self.buffer.placement(config.num_experts)
        self.router = TopKRouter(config, self.buffer)
        self.experts = GroupedExperts(config, placement.experts_of(self.buffer.rank))
        self.shared_experts = None if config.shared_ffn_hidden_size is None else SharedExperts(config)
        self._last_rows = torch.zeros((), dtype=torch.int32, device="cpu")

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Applies the layer.

        Args:
            x: [..., H], the dtype of the parameters, or any row dtype under autocast. T = 0 is fine. For the
                per-sequence loss a 3-dimensional x is [batch, sequence, H] (or [sequence, batch, H] with
                `router.batch_first: false`), anything else one sequence.
            padding_mask: bool of shape x.shape[:-1], True = padding: routed nowhere and counted nowhere.

        Returns:
            y, shape and dtype of x, also under autocast.

        Raises:
            ValueError: the last dimension is not H, x is not floating, or the mask does not fit; on every rank.
            EPTimeoutError: a rank of the group did not come.
        """
        error = self._input_error(x, padding_mask)
        if error is not None:
            self.buffer.backend.refuse("dispatch", error)  # so that the other ranks raise too, and none waits
        x_TH = x.reshape(-1, x.shape[-1])
        mask_T = None if padding_mask is None else padding_mask.reshape(-1)
        if mask_T is not None:  # padding may hold anything, NaN too: no part of the layer reads it
            x_TH = x_TH.masked_fill(mask_T.unsqueeze(1), 0)
        topk_idx, topk_weights = self.router(x_TH, mask_T, self._sequence_idx(x))
        shared = None
        if self.shared_experts is not None:
            shared = SharedRun(self.shared_experts, x_TH, apart=runs_beside(self.buffer))
        there = Beside(self.buffer, None if shared is None else shared.begin)
        home = Beside(self.buffer, None if shared is None else shared.finish)
        out, rows_RH = self._dispatched(there, x_TH, topk_idx, topk_weights)
        y_TH = self._combined(home, rows_RH, out)
        if shared is not None:
            y_TH = y_TH + shared.result().to(y_TH.dtype)
        return y_TH.reshape(x.shape)

    def _dispatched(
        self, way: Beside, x_TH: Tensor, topk_idx: Tensor, topk_weights: Tensor
    ) -> tuple[DispatchOutput | Fp8DispatchOutput, Tensor]:
        """What dispatch gave, and what the routed experts made of it: [R, H]."""
        num_experts, alignment = self.config.num_experts, self.config.ep.alignment
        fp8, uses = self.experts.fp8, self.config.fp8
        if fp8 is not None:
            alignment = math.lcm(alignment, fp8.recipe.alignment)
            self.experts.look_at_fp8_weights()
        sent_TH, sent_weights = way.tie(x_TH, topk_weights)
        if fp8 is not None and uses.dispatch:
            cast = fp8.recipe.payload
            sent: Fp8DispatchOutput = dispatch_fp8(
                way.buffer, sent_TH, topk_idx, sent_weights, num_experts=num_experts, alignment=alignment, cast=cast
            )
            out: DispatchOutput | Fp8DispatchOutput = sent
            rows: Tensor | Fp8Rows = sent.rows
        else:
            received = dispatch(
                way.buffer, sent_TH, topk_idx, sent_weights, num_experts=num_experts, alignment=alignment
            )
            out, rows = received, received.x
        self._last_rows = out.expert_offsets[-1]
        # The experts weigh their rows: combine and its backward are sums and copies then, and keep no results.
        return out, self.experts(rows, out.tokens_per_expert, out.expert_offsets, out.topk_weights)

    def _combined(self, way: Beside, rows_RH: Tensor, out: DispatchOutput | Fp8DispatchOutput) -> Tensor:
        """The routed experts' part of y."""
        rows_RH, _ = way.tie(rows_RH, None)
        exact = self.config.ep.exact
        if self.experts.fp8 is not None and self.config.fp8.grad_dispatch:
            y_TH: Tensor = combine_fp8_grad(way.buffer, rows_RH, out.handle, exact)
            return y_TH
        return combine(way.buffer, rows_RH, out.handle, exact=exact)

    def routing_stats(self) -> dict[str, Tensor]:
        """What the last forward did on this rank, as detached tensors; no communication.

        Returns:
            `tokens_per_expert` [E] int64, routed pairs of this rank's tokens before capacity drops;
            `max_over_mean_load` float32 scalar, its largest entry over its mean (1 is perfect; 0 without tokens);
            `dropped` int64 scalar, pairs dropped by the capacity limit; `rows` int64 scalar, rows that this rank's
            experts received, padding included; and, of the last forward that trained, one scalar for each auxiliary
            loss that is switched on, coefficient included (`aux_loss`, `seq_aux_loss`, `global_aux_loss`, `z_loss`).
            Sum `tokens_per_expert` over the ranks for the load of the group.
        """
        counts_E = self.router.last_counts.detach().clone()
        mean = counts_E.float().mean().clamp(min=1e-30)
        return {
            "tokens_per_expert": counts_E,
            "max_over_mean_load": counts_E.max() / mean,
            "dropped": self.router.last_dropped.detach().clone(),
            "rows": self._last_rows.to(torch.int64),
            **{name: loss.detach().clone() for name, loss in self.router.last_losses.items()},
        }

    def update_expert_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """One step of aux-loss-free balancing: experts below the mean load get a higher bias. Collective.

        Call it after `optimizer.step()`. It uses the tokens whose backward ran since the last call, so recompute,
        evaluation and gradient accumulation are counted right.

        Args:
            group: the ranks whose tokens count together; None for the EP group. With data parallelism beside EP give
                the group of all ranks, or their biases drift apart.
        """
        self.router.update_expert_bias(self.buffer.all_reduce if group is None else _sum_over(group))

    def _input_error(self, x: Tensor, padding_mask: Tensor | None) -> ValueError | None:
        """Why this rank cannot serve its input, if it cannot."""
        if x.dim() < 1 or x.shape[-1] != self.config.hidden_size or not x.is_floating_point():
            return ValueError(
                f"x is {x.dtype} of shape {list(x.shape)}, but this layer has hidden_size = "
                f"{self.config.hidden_size}; the last dimension must be that, and the dtype a floating one."
            )
        if padding_mask is None:
            return None
        if padding_mask.shape != x.shape[:-1] or padding_mask.dtype != torch.bool or padding_mask.device != x.device:
            return ValueError(
                f"padding_mask is {padding_mask.dtype} of shape {list(padding_mask.shape)} on {padding_mask.device}; "
                f"it must be bool of shape {list(x.shape[:-1])} on {x.device}, True for padding."
            )
        return None

    def _sequence_idx(self, x: Tensor) -> Tensor | None:
        """[T] number of each token's sequence, where a loss asks for it."""
        if x.dim() != 3 or not self.config.router.seq_aux_loss_coef:
            return None
        first, second = x.shape[:2]
        if self.config.router.batch_first:
            return torch.arange(first, device=x.device).repeat_interleave(second)
        return torch.arange(second, device=x.device).repeat(first)


def _sum_over(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def all_reduce(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=group)
        return tensor

    return all_reduce


def _check_size(config: MoEConfig, ep_group: dist.ProcessGroup | None) -> None:
    size = config.ep.size
    if size == "auto":
        num_ranks = os.environ.get("WORLD_SIZE", "")
        if ep_group is None and not dist.is_initialized() and num_ranks.isdecimal() and int(num_ranks) > 1:
            raise ConfigError(
                f"ep_group is None and WORLD_SIZE is {num_ranks}, but torch.distributed is not initialised, and "
                "group.WORLD is None until then; call torch.distributed.init_process_group() before, or set ep.size to "
                "1 for a layer that holds all experts."
            )
        return
    if ep_group is None and size > 1:
        raise ConfigError(
            f"ep.size is {size}, but the layer was given no ep_group; call torch.distributed.init_process_group() and "
            "pass a group of that many ranks, or set ep.size to 1."
        )
    actual = 1 if ep_group is None else dist.get_world_size(ep_group)
    if size != actual:
        raise ConfigError(
            f"ep.size is {size}, but ep_group has {actual} ranks; pass a group of {size} ranks, or set ep.size to "
            f"{actual} or auto."
        )


def _check_buffer(buffer: Buffer | None, ep_group: dist.ProcessGroup | None) -> None:
    size = 1 if ep_group is None else dist.get_world_size(ep_group)
    if buffer is not None and buffer.group_size != size:
        raise ConfigError(
            f"the buffer spans {buffer.group_size} ranks, but ep_group has {size}; give a buffer over the same group."
        )
