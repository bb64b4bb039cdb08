"""What the ranks of the Megatron tests run: Megatron's own MoE layer beside ours, same weights, same tokens.

The functions here run in processes of their own (`tests/distributed/conftest.py`): where there is no GPU they stand in
for torch.cuda, which no other test should meet.

Letters: T tokens of a rank, H hidden, E experts.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from examples.megatron_tiny import cpu
from moe_ep.integrations import deep_ep

H, E, T, SEQUENCES = 16, 8, 24, 2  # T is [sequence, batch] = [12, 2]

Layout = tuple[int, int, int]  # tensor, expert and expert tensor parallel sizes


def start_megatron() -> None:
    """Imports Megatron with this package under DeepEP's name; a second call does nothing."""
    if "megatron.core" in sys.modules:
        return
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        cpu.stand_in_for_cuda()
    deep_ep.install()
    import megatron.core  # noqa: F401

    if str(torch.cuda.current_device()) == "cpu":
        cpu.mend_megatron()


def arrange(layout: Layout) -> None:
    """Megatron's groups over all ranks of the world; kept where they are the same as before."""
    from megatron.core import parallel_state as state

    if state.is_initialized():
        found = (
            state.get_tensor_model_parallel_world_size(),
            state.get_expert_model_parallel_world_size(),
            state.get_expert_tensor_parallel_world_size(),
        )
        if found == layout:
            return
        state.destroy_model_parallel()
    tp, ep, etp = layout
    state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    if torch.cuda.is_available():
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(1)


def config_of(layout: Layout, **changes: Any) -> Any:
    """A configuration for one MoE layer; `changes` are Megatron's fields."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp, ep, etp = layout
    fields: dict[str, Any] = {
        "num_layers": 1, "hidden_size": H, "num_attention_heads": 2, "ffn_hidden_size": 32, "moe_ffn_hidden_size": 24,
        "num_moe_experts": E, "moe_router_topk": 2, "moe_router_dtype": "fp32", "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "aux_loss", "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp,
        "sequence_parallel": tp > 1, "add_bias_linear": False, "gated_linear_unit": True, "activation_func": F.silu,
        "use_cpu_initialization": True, "gradient_accumulation_fusion": False, "bias_activation_fusion": False,
        "transformer_impl": "local",
    }  # fmt: skip
    return TransformerConfig(**{**fields, **changes})


def layer_of(config: Any, dispatcher: str, settings: Any = None) -> Any:
    """One MoE layer in training mode: "alltoall", "moe_ep" or "deep_ep-api"."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    from moe_ep.integrations import megatron as ours

    if dispatcher == "deep_ep-api":
        config = dataclasses.replace(config, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm)
    mlp = (ours.with_moe_ep(spec, settings) if dispatcher == "moe_ep" else spec).submodules.mlp
    layer = mlp(config=config) if callable(mlp) and not hasattr(mlp, "module") else build_module(mlp, config=config)
    layer.set_layer_number(0)
    return layer.cuda()


def tokens(num_rows: int, num_alike: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, sequences, H], the same on every `num_alike` neighbouring ranks and else different."""
    source = torch.Generator().manual_seed(100 + dist.get_rank() // num_alike)
    return torch.randn(num_rows, SEQUENCES, H, generator=source).to(dtype).cuda().requires_grad_()


def outcome(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """Output and every gradient of a forward and backward under an uneven loss."""
    source = torch.Generator().manual_seed(7)
    slope = torch.randn(x.shape, generator=source).to(x)
    y, bias = layer(x)
    assert bias is None
    (y * slope).sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: weight.grad for name, weight in layer.named_parameters()}
    found |= {name: value for name, value in layer.named_buffers() if "tokens_per_expert" in name}
    return {name: torch.zeros(()) if value is None else value.float().cpu() for name, value in found.items()}


def compare(
    group: dist.ProcessGroup,
    layout: Layout,
    dispatcher: str,
    changes: dict[str, Any],
    own_changes: dict[str, Any] | None = None,
    settings: Any = None,
    num_tokens: tuple[int, ...] | None = None,
) -> list[tuple[str, float]]:
    """The largest departure of each tensor from alltoall's, relative to its largest entry.

    Args:
        group: all ranks.
        layout: Megatron's parallel sizes.
        dispatcher: "moe_ep" or "deep_ep-api".
        changes: of Megatron's fields, for both.
        own_changes: for the layer under test alone.
        settings: of this package.
        num_tokens: sequence length on each rank; None for the same on all.
    """
    start_megatron()
    arrange(layout)
    torch.manual_seed(1)
    stock = layer_of(config_of(layout, **changes), "alltoall")
    under_test = layer_of(config_of(layout, **changes, **(own_changes or {})), dispatcher, settings)
    under_test.load_state_dict(stock.state_dict())
    rows = T // SEQUENCES if num_tokens is None else num_tokens[dist.get_rank()]
    # Between expert tensor parallel ranks alltoall gathers rows, which gloo can only where they have equally many.
    wanted, found = outcome(stock, tokens(rows, layout[2])), outcome(under_test, tokens(rows, layout[2]))
    assert wanted.keys() == found.keys()
    return [(name, departure(found[name], wanted[name])) for name in wanted]


def departure(found: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference over the largest wanted entry."""
    if found.numel() == 0:
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
