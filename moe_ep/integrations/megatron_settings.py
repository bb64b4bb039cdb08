"""What a Megatron-Core run tells this package, and what a YAML file of this package tells Megatron-Core.

Megatron's own fields rule the router, the capacity and the padding for FP8; they also give the SM budget. The section
`moe.ep` of a YAML file adds what Megatron has no field for. The other way round, `transformer_fields` turns a section
`moe` into fields of Megatron's TransformerConfig, or says why one has no counterpart there.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from moe_ep.buffer import Buffer
from moe_ep.config import EPConfig, MoEConfig, RouterConfig, load_config
from moe_ep.errors import ConfigError
from moe_ep.integrations.megatron_versions import num_sms, quantization_alignment

_EXCHANGES = "_moe_ep_exchanges"  # where a TransformerConfig keeps its buffers


@dataclass(frozen=True)
class Settings:
    """What the exchange is set to beside Megatron's own fields; the defaults add nothing to them.

    Attributes:
        backend: "auto", "torch", "intranode" or "internode", as for `moe_ep.Buffer`.
        num_sms: SM budget; None takes Megatron's `moe_flex_dispatcher_num_sms`, `moe_deepep_num_sms` or
            `moe_hybridep_num_sms`, whichever its version and backend use, and else the default of `Buffer`.
        timeout_secs: limit of every wait, in seconds.
        alignment: rows per expert are padded to a multiple of this, and of what FP8 asks for.
        exact: sum the rows of a token in slot order, whatever the number of ranks.
        size: ranks that are expected to share the experts, or "auto".
        ranks_per_node, hop: what nodes are and what carries rows between them, for backend "internode".
    """

    backend: str = "auto"
    num_sms: int | None = None
    timeout_secs: float = 100.0
    alignment: int = 1
    exact: bool = False
    size: int | str = "auto"
    ranks_per_node: int | None = None
    hop: str = "auto"

    @classmethod
    def of(cls, source: Settings | EPConfig | str | os.PathLike[str] | None) -> Settings:
        """From a section `moe.ep`, or from the YAML file that holds it; None gives the defaults.

        Raises:
            ConfigError: the file has a wrong setting.
        """
        if source is None:
            return cls()
        if isinstance(source, Settings):
            return source
        ep = source if isinstance(source, EPConfig) else load_config(source).moe.ep
        return cls(**{"num_sms" if name == "comm_sms" else name: value for name, value in ep})

    def alignment_for(self, config: Any) -> int:
        """The padding of each expert's rows under Megatron's `config`."""
        return math.lcm(self.alignment, quantization_alignment(config))


def check_config(config: Any, settings: Settings, num_ranks: int) -> None:
    """Refuses what cannot work.

    Raises:
        ConfigError: a sentence that names Megatron's field, or the setting.
    """
    if settings.size not in ("auto", num_ranks):
        raise ConfigError(
            f"moe.ep.size is {settings.size}, but Megatron shares the experts between {num_ranks} ranks (expert model "
            "parallel size times expert tensor parallel size); set it to that, or to auto."
        )
    if config.overlap_moe_expert_parallel_comm and (
        config.moe_token_dispatcher_type != "flex" or config.moe_flex_dispatcher_backend != "hybridep"
    ):
        raise ConfigError(
            "overlap_moe_expert_parallel_comm is on with moe_token_dispatcher_type="
            f"{config.moe_token_dispatcher_type!r} and moe_flex_dispatcher_backend="
            f"{config.moe_flex_dispatcher_backend!r}: there Megatron's schedule frees the rows that the experts got, "
            "which here are the very rows that their backward needs. Set moe_token_dispatcher_type='flex' and "
            "moe_flex_dispatcher_backend='hybridep', for which it keeps them."
        )


# -- buffers ----------------------------------------------------------------------------------------------------------


@dataclass
class _Exchanges:
    """The buffers of one model: its layers share one for each group and setting."""

    buffers: dict[tuple[Any, ...], Buffer] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Exchanges:
        """Megatron copies its configuration for single layers; they share the buffers."""
        return self

    def __reduce__(self) -> tuple[type[_Exchanges], tuple[()]]:
        """A pickled configuration has no buffers."""
        return _Exchanges, ()


def shared_buffer(config: Any, group: dist.ProcessGroup, settings: Settings) -> Buffer:
    """The buffer that all layers of one TransformerConfig share on `group`; made on first use. Collective then.

    The configuration object keeps it, and with it all ranks of the group make and drop it at the same places.
    """
    budget = num_sms(config) if settings.num_sms is None else settings.num_sms
    owner = config.__dict__.setdefault(_EXCHANGES, _Exchanges())
    arguments = {
        "backend": settings.backend,
        "num_sms": budget,
        "timeout_secs": settings.timeout_secs,
        "ranks_per_node": settings.ranks_per_node,
        "hop": settings.hop,
    }
    key = (group, *arguments.values())
    if key not in owner.buffers:
        owner.buffers[key] = Buffer(group, **arguments)  # type: ignore[arg-type]
    buffer: Buffer = owner.buffers[key]
    return buffer


def close_buffers(config: Any) -> None:
    """Closes the buffers of the layers that were built from `config`; they cannot run after it."""
    owner = config.__dict__.pop(_EXCHANGES, None)
    for buffer in owner.buffers.values() if owner is not None else ():
        buffer.close()


# -- from this package's YAML to Megatron's fields --------------------------------------------------------------------


def transformer_fields(moe: MoEConfig) -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig that make its MoE layer the one that `moe` describes.

    Sizes of the groups (`expert_model_parallel_size`) and what is not of the MoE layer are left to the caller.

    Raises:
        ConfigError: a setting that Megatron-Core has no counterpart of; the sentence names it and what to do.
    """
    if moe.fp8.recipe != "none":
        raise ConfigError(
            f"moe.fp8.recipe is {moe.fp8.recipe}; in Megatron-Core FP8 is asked for by its own fields fp8 and "
            "fp8_recipe. Set moe.fp8.recipe to none and give those."
        )
    router = moe.router
    losses = {
        "aux_loss": router.aux_loss_coef,
        "seq_aux_loss": router.seq_aux_loss_coef,
        "global_aux_loss": router.global_aux_loss_coef,
    }
    wanted = {name: coef for name, coef in losses.items() if coef}
    return {
        "hidden_size": moe.hidden_size,
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "gated_linear_unit": moe.activation == "swiglu",
        "activation_func": torch.nn.functional.silu if moe.activation == "swiglu" else torch.nn.functional.gelu,
        "add_bias_linear": False,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "moe_router_topk": router.topk,
        "moe_router_score_function": router.score_function,
        "moe_router_pre_softmax": _pre_softmax(router),
        "moe_router_topk_scaling_factor": None if router.scaling_factor == 1 else router.scaling_factor,
        **_groups(router),
        "moe_router_enable_expert_bias": router.expert_bias,
        "moe_router_bias_update_rate": router.bias_update_rate,
        "moe_router_load_balancing_type": list(wanted) or "none",
        "moe_aux_loss_coeff": list(wanted.values()) or 0.0,
        "moe_z_loss_coeff": router.z_loss_coef or None,
        "moe_router_dtype": "fp32",
        "moe_expert_capacity_factor": router.capacity_factor,
        "moe_token_drop_policy": "probs" if router.drop_policy == "weight" else "position",
    }


def _pre_softmax(router: RouterConfig) -> bool:
    """Megatron renormalises sigmoid scores always and softmax scores never; softmax over the K chosen is normalised."""
    if router.score_function == "sigmoid":
        if router.normalize != (router.topk > 1):
            raise ConfigError(
                f"moe.router.normalize is {str(router.normalize).lower()} with sigmoid scores and topk {router.topk}; "
                f"Megatron-Core normalises sigmoid scores where topk is above 1, and there only. "
                f"Set normalize to {str(router.topk > 1).lower()}."
            )
        return False
    if not router.pre_softmax or not router.normalize:
        return router.pre_softmax
    if router.num_groups is None and router.topk > 1:
        return False  # softmax over all, then divided by the sum of the K: the softmax over the K
    raise ConfigError(
        "moe.router.normalize is true with a softmax over all experts, groups or topk 1; Megatron-Core does not "
        "normalise those. Set normalize to false, or score_function to sigmoid."
    )


def _groups(router: RouterConfig) -> dict[str, int | None]:
    """Megatron scores a group by its best topk // group_topk experts."""
    if router.num_groups is None or router.group_topk is None:
        return {}
    num_best = router.topk // router.group_topk
    if router.group_score != "megatron" and num_best != {"top2": 2, "max": 1}[router.group_score]:
        raise ConfigError(
            f"moe.router.group_score is {router.group_score}; Megatron-Core scores a group by its best "
            f"topk // group_topk = {num_best} experts. Set group_score to megatron, or change topk or group_topk."
        )
    return {"moe_router_num_groups": router.num_groups, "moe_router_group_topk": router.group_topk}
