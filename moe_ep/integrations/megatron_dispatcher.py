"""The token dispatcher that Megatron-Core's MoE layer drives, over `moe_ep.dispatch` and `moe_ep.combine`.

Megatron splits a dispatcher into phases so that its schedules can overlap them; communication may happen in
`token_dispatch` and `token_combine` only. Here dispatch hands out expert_major rows, so that the permutation is part of
it and the phases beside it have nothing to do: rows arrive grouped by expert and padded, combine takes them as the
experts leave them. Megatron multiplies the probabilities inside the experts, so combine is the plain sum.

The experts of a token come from the router's map, never from the probabilities: an expert whose probability is 0, or
underflowed to it, still gets its token.

Letters: T tokens of this rank, H hidden, E experts of the group (times the expert-tensor-parallel size: each of those
ranks gets every token), K slots a token, R rows received.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import (
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
    _DispatchManager,
)
from torch import Tensor

from moe_ep.autograd.combine import combine
from moe_ep.autograd.dispatch import dispatch
from moe_ep.errors import ConfigError
from moe_ep.handle import DispatchHandle, PackedHandle
from moe_ep.integrations.megatron_settings import Settings, check_config, shared_buffer
from moe_ep.layers.slots_of_map import slots_of_map

MAX_SLOTS = 64  # of the exchange


class ExchangeManager(_DispatchManager):
    """Moves tokens for Megatron's flex dispatcher, in the place of its managers for DeepEP.

    Args:
        group: the ranks that share the experts, expert-tensor-parallel ranks included.
        num_local_experts: experts of this rank.
        router_topk: slots of a token, times the expert-tensor-parallel size.
        num_experts: E.
        config: Megatron's TransformerConfig.
        settings: this package's part; None takes what Megatron's fields say.

    Attributes:
        token_indices, token_probs: [T, K], what is about to be dispatched; a CUDA graph of the router restores them.
        dispatched_probs: [R], what arrived.

    Raises:
        ConfigError: a combination of settings that cannot work; the sentence names the field.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        num_local_experts: int,
        router_topk: int,
        num_experts: int,
        config: Any,
        settings: Settings | None = None,
    ) -> None:
        settings = settings or Settings()
        check_config(config, settings, group.size())
        self.group = group
        self.num_local_experts = num_local_experts
        self.num_experts = num_experts
        # Padding to capacity hands experts tokens that did not choose them, so a token may have more than its K.
        pads = config.moe_expert_capacity_factor is not None and config.moe_pad_expert_input_to_capacity
        self.num_slots = num_experts if pads else router_topk
        if self.num_slots > MAX_SLOTS:
            raise ConfigError(
                f"a token may have {self.num_slots} experts here ({num_experts} experts, expert tensor parallel ranks "
                f"counted each, topk {router_topk}{', padded to capacity' if pads else ''}); the exchange serves "
                f"{MAX_SLOTS}. Use a smaller moe_router_topk or expert_tensor_parallel_size"
                f"{', or moe_pad_expert_input_to_capacity=False' if pads else ''}."
            )
        self.wants_fp64_probs = config.moe_router_dtype == "fp64"
        self.alignment = settings.alignment_for(config)
        self.exact = settings.exact
        self.buffer = shared_buffer(config, group, settings)
        self.token_indices: Tensor | None = None
        self.token_probs: Tensor | None = None
        self.dispatched_probs: Tensor | None = None
        self.tokens_per_expert: Tensor | None = None
        self.handle: DispatchHandle | PackedHandle | None = None

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Takes the router's choice: `routing_map` bool and `probs`, both [T, E] or [T, ranks, local experts]."""
        routing_map_TE = routing_map.reshape(-1, self.num_experts)
        probs_TE = probs.reshape(-1, self.num_experts)
        self.token_indices, self.token_probs = slots_of_map(routing_map_TE, probs_TE, self.num_slots)

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Sends the tokens [T, H] to their experts; the rows [R, H] by expert, padded. Collective.

        `async_finish` and `allocate_on_comm_stream` are accepted: work is enqueued on the current stream, on which
        Megatron's schedules place it.
        """
        assert self.token_indices is not None, "Megatron calls dispatch_preprocess before token_dispatch"
        assert self.token_probs is not None
        wants_fp64 = hidden_states.dtype == torch.float64
        out = dispatch(
            self.buffer,
            hidden_states,
            self.token_indices,
            self.token_probs.to(torch.float64 if wants_fp64 else torch.float32),
            num_experts=self.num_experts,
            layout="expert_major",
            alignment=self.alignment,
        )
        self.handle = out.handle
        self.tokens_per_expert = torch.tensor(out.tokens_per_expert, dtype=torch.int64, device="cpu")
        assert out.topk_weights is not None
        self.dispatched_probs = out.topk_weights.double() if self.wants_fp64_probs else out.topk_weights
        return out.x

    def combine(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Brings the experts' rows [R, H] home, summed per token to [T, H]. Collective."""
        assert self.handle is not None, "Megatron calls token_dispatch before token_combine"
        y = combine(self.buffer, hidden_states, self.handle, exact=self.exact)
        self.handle = self.dispatched_probs = None
        return y

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows as they came, which is by expert already, and their probabilities [R]."""
        return hidden_states, self.dispatched_probs

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """The rows as they are: combine undoes the permutation."""
        return hidden_states

    def get_number_of_tokens_per_expert(self) -> Tensor | None:
        """[local experts] int64 on the CPU, the split sizes of the rows, padding included."""
        return self.tokens_per_expert


class TokenDispatcher(MoEFlexTokenDispatcher):
    """Megatron's flex dispatcher with `ExchangeManager` behind it, on any number of ranks, also one.

    Args:
        num_local_experts: experts of this rank.
        local_expert_indices: which they are.
        config: Megatron's TransformerConfig.
        pg_collection: Megatron's process groups.
        settings: this package's part; None takes what Megatron's fields say.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
        settings: Settings | None = None,
    ) -> None:
        # Past the constructor of the flex dispatcher, which asks for an installed DeepEP.
        MoETokenDispatcher.__init__(self, config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self._comm_manager = ExchangeManager(
            group=self.tp_ep_group,
            num_local_experts=num_local_experts,
            router_topk=self.tp_size * config.moe_router_topk,
            num_experts=self.tp_size * config.num_moe_experts,
            config=config,
            settings=settings,
        )
        self.cudagraph_attrs = ["_comm_manager.token_probs", "_comm_manager.token_indices"]

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Takes the shared expert that is to run beside dispatch and combine."""
        self.shared_experts = shared_experts

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Any]:
        """[..., H] tokens with their map and probabilities [T, E]; gives [T, H] and the probabilities [T, K]."""
        self.hidden_shape = hidden_states.shape
        if self.tp_size > 1:
            routing_map, probs = self._initialize_metadata(routing_map, probs)
        self._comm_manager.setup_metadata(routing_map, probs)
        return hidden_states.view(-1, self.hidden_shape[-1]), self._comm_manager.token_probs

    def token_dispatch(
        self,
        hidden_states: Tensor,
        probs: Tensor | None = None,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[Tensor, Any]:
        """Sends tokens and probabilities to the experts; `probs` may be a detached copy of those of the first phase."""
        if probs is not None:
            self._comm_manager.token_probs = probs
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        rows_RH = self._comm_manager.dispatch(hidden_states, async_finish, allocate_on_comm_stream)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows_RH)
        return rows_RH, self._comm_manager.dispatched_probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Rows, rows per expert, probabilities [R]: as they arrived."""
        return hidden_states, self._comm_manager.get_number_of_tokens_per_expert(), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' rows as they are."""
        return hidden_states

    def token_combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Brings the rows home, summed per token to [T, H]."""
        return self._comm_manager.combine(hidden_states, async_finish, allocate_on_comm_stream)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """In the shape of the tokens, the shared expert's output added where it ran beside."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
            hidden_states = hidden_states + self.shared_experts.get_output()
        return hidden_states.view(self.hidden_shape)
