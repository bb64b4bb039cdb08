"""What the ranks of the Megatron tests run: Megatron's own MoE layer beside ours, same weights, same tokens.

The functions here run in processes of their own (`tests/distributed/conftest.py`): where there is no GPU they stand in
for torch.cuda, which no other test should meet.

Letters: T tokens of a rank, H hidden, E experts.
"""

from __future__ import annotations

import copy
import dataclasses
import math
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


def arrange_on_cuda(group: dist.ProcessGroup, layout: Layout) -> None:
    """The first job of ranks on GPUs: the imports, which take their time."""
    start_megatron()
    arrange(layout)


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
    if config.moe_grouped_gemm:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec as make_spec
    else:
        make_spec = get_gpt_layer_local_spec
    spec = make_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm)
    mlp = (ours.with_moe_ep(spec, settings) if dispatcher == "moe_ep" else spec).submodules.mlp
    layer = mlp(config=config) if callable(mlp) and not hasattr(mlp, "module") else build_module(mlp, config=config)
    layer.set_layer_number(0)
    return layer.to(torch.cuda.current_device(), config.params_dtype)


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
    inputs = [tokens(rows, layout[2], stock.config.params_dtype) for _ in range(2)]
    wanted, found = outcome(stock, inputs[0]), outcome(under_test, inputs[1])
    assert wanted.keys() == found.keys()
    return [(name, departure(found[name], wanted[name])) for name in wanted]


def departure(found: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference over the largest wanted entry; infinite for NaN, which no limit would catch."""
    if found.numel() == 0:
        return 0.0
    worst = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    return math.inf if math.isnan(worst) else worst


# -- the dispatcher alone ---------------------------------------------------------------------------------------------


def moved(dispatcher: Any, x_TH: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Through all phases with experts that multiply by the probability: (rows, rows per expert, probabilities, y)."""
    h, p = dispatcher.dispatch_preprocess(x_TH, routing_map, probs)
    h, p = dispatcher.token_dispatch(h, p)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(h, p)
    out = dispatcher.combine_preprocess((rows * row_probs.unsqueeze(-1)).to(rows.dtype))
    return rows, counts, row_probs, dispatcher.combine_postprocess(dispatcher.token_combine(out))


def zero_probability(group: dist.ProcessGroup, dispatcher: str, layout: Layout = (1, 4, 1)) -> tuple[list[int], float]:
    """Every token goes to experts 1 and 6, with probability 0 to expert 6; rows per local expert, and |dy/dp| there."""
    start_megatron()
    arrange(layout)
    layer = layer_of(config_of(layout), dispatcher)
    x_TH = tokens(4).reshape(-1, H).detach()
    routing_map = torch.zeros(len(x_TH), E, dtype=torch.bool, device=x_TH.device)
    routing_map[:, [1, 6]] = True
    probs = torch.zeros(len(x_TH), E, device=x_TH.device)
    probs[:, 1] = 1.0
    probs.requires_grad_()
    _, counts, _, y = moved(layer.token_dispatcher, x_TH, routing_map, probs)
    y.sum().backward()
    assert probs.grad is not None
    return counts.tolist(), float((probs.grad[:, 6] - x_TH.sum(1)).abs().max())


def padded_counts(group: dist.ProcessGroup, alignment: int, fp8: bool) -> tuple[list[int], int, float]:
    """Rows per local expert with padding, their sum in the rows, and the sum of what padding rows hold."""
    start_megatron()
    arrange((1, 4, 1))
    config = config_of((1, 4, 1))
    if fp8:  # set afterwards: Megatron asks for Transformer Engine when it is given at once
        config.fp8, config.moe_router_padding_for_quantization = "hybrid", True
    layer = layer_of(config, "moe_ep", _settings(alignment))
    x_TH = tokens(9).reshape(-1, H).detach()
    probs, routing_map = layer.router(x_TH.unsqueeze(1))
    rows, counts, row_probs, _ = moved(layer.token_dispatcher, x_TH, routing_map, probs)
    return counts.tolist(), rows.shape[0], float(rows[row_probs == 0].abs().sum())


def without_tokens(group: dist.ProcessGroup) -> tuple[float, int]:
    """The dispatcher where this is rank 1, which has no tokens: departure of y from x, rows received."""
    start_megatron()
    arrange((1, 4, 1))
    layer = layer_of(config_of((1, 4, 1)), "moe_ep")
    x_TH = tokens(0 if dist.get_rank() == 1 else 3).reshape(-1, H).detach().requires_grad_()
    routing_map = torch.zeros(len(x_TH), E, dtype=torch.bool, device=x_TH.device)
    routing_map[:, [0, 2]] = True  # experts of ranks 0 and 1 only
    rows, _, _, y_TH = moved(layer.token_dispatcher, x_TH, routing_map, routing_map / 2)
    y_TH.sum().backward()
    assert x_TH.grad is not None
    return max(departure(y_TH.detach(), x_TH.detach()), departure(x_TH.grad, torch.ones_like(x_TH))), rows.shape[0]


def two_in_flight(group: dist.ProcessGroup) -> float:
    """Two forwards of one layer before the backward of either, of other lengths; departure from one by one."""
    start_megatron()
    arrange((1, 4, 1))
    torch.manual_seed(1)
    layer = layer_of(config_of((1, 4, 1)), "moe_ep")
    inputs = [tokens(3), tokens(5)]
    alone = []
    for x in inputs:
        layer(x)[0].square().sum().backward()
        alone.append(x.grad)
        x.grad = None
    losses = [layer(x)[0].square().sum() for x in inputs]
    for loss in losses:
        loss.backward()
    return max(departure(x.grad, wanted) for x, wanted in zip(inputs, alone, strict=True))  # type: ignore[arg-type]


def waits_of_a_step(group: dist.ProcessGroup, dispatcher: str, changes: dict[str, Any]) -> list[str]:
    """What PyTorch reports as a wait for the device in a forward and backward, on CUDA."""
    start_megatron()
    arrange((1, 2, 1))
    layer = layer_of(config_of((1, 2, 1), moe_router_load_balancing_type="none", **changes), dispatcher)
    x = tokens(8, dtype=layer.config.params_dtype)
    layer(x)[0].float().square().sum().backward()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            layer(x)[0].float().square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{warning.filename}:{warning.lineno}" for warning in caught if "synchroniz" in str(warning.message)]


def shared_buffers(group: dist.ProcessGroup, layout: Layout = (1, 4, 1)) -> tuple[bool, bool, int | None, str]:
    """Whether layers of one configuration share a buffer, those of another do not; its SM budget; its backend."""
    start_megatron()
    from moe_ep.integrations import megatron as ours

    arrange(layout)
    config = config_of(layout, moe_deepep_num_sms=24)
    first, second = layer_of(config, "moe_ep"), layer_of(copy.deepcopy(config), "moe_ep")
    other = layer_of(config_of(layout), "moe_ep")
    found = first.buffer is second.buffer, first.buffer is other.buffer, first.buffer.num_sms, first.buffer.backend_name
    ours.close_buffers(config)
    return found


def _settings(alignment: int) -> Any:
    from moe_ep.config import EPConfig

    return EPConfig(alignment=alignment)


# -- a whole model ----------------------------------------------------------------------------------------------------


def layers_of_the_spec(group: dist.ProcessGroup, num_layers: int, pattern: list[int]) -> list[str]:
    """What a GPT is made of whose layer spec is the one for --spec: the class and module of each layer's MLP."""
    start_megatron()
    from megatron.core.models.gpt import GPTModel

    from moe_ep.integrations import megatron as ours

    arrange((1, 2, 1))
    config = config_of(
        (1, 2, 1), num_layers=num_layers, moe_layer_freq=pattern, normalization="RMSNorm",
        moe_router_load_balancing_type="none",  # Megatron's tally of losses is as long as its first model is deep
    )  # fmt: skip
    model = GPTModel(config, ours.spec, vocab_size=32, max_sequence_length=8, position_embedding_type="rope").cuda()
    ids = torch.arange(16, device=next(model.parameters()).device).view(2, 8)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=ids.device).triu(1)
    model(ids, ids % 8, mask, labels=ids).mean().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    return [f"{type(layer.mlp).__module__}.{type(layer.mlp).__name__}" for layer in model.decoder.layers]
