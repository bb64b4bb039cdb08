"""A small GPT with Megatron-Core's own model classes, optimizer and schedules, and a dispatcher chosen by name.

The three dispatchers differ in one line of the layer spec or of the configuration and in nothing else; all start from
the same weights and see the same text. Import this module after `stand_in_for_cuda()` where there is no GPU, and after
`moe_ep.integrations.deep_ep.install()` for "deep_ep-api".

Letters: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moe_ep.config import Config
from moe_ep.integrations import megatron as moe_ep_megatron

DISPATCHERS = ("alltoall", "moe_ep", "deep_ep-api")
LAST_BIT = 2**-8  # of a bfloat16, relative
Batch = Callable[[int, int], tuple[Tensor, Tensor]]  # (step, micro-batch) -> inputs and targets [B, S]


@dataclass
class Curve:
    """One run: the loss of this rank's tokens and the norm of the whole gradient, at each step."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    seconds: float = 0.0


def transformer_config(config: Config, dispatcher: str, on_cuda: bool, **changes: Any) -> TransformerConfig:
    """Megatron's configuration for a file of this package; `changes` are fields of Megatron's that win."""
    assert config.model is not None
    assert config.train is not None
    model, is_bf16 = config.model, config.train.dtype == "bfloat16"
    with_engine = on_cuda and _has_transformer_engine()
    fields: dict[str, Any] = {
        **moe_ep_megatron.transformer_fields(config.moe),
        "moe_token_dispatcher_type": "flex" if dispatcher == "deep_ep-api" else "alltoall",
        "moe_flex_dispatcher_backend": "deepep",
        "moe_layer_freq": [0] * model.num_dense_layers + [1] * (model.num_layers - model.num_dense_layers),
        "moe_grouped_gemm": with_engine,
        "transformer_impl": "transformer_engine" if with_engine else "local",
        "num_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "ffn_hidden_size": model.dense_ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "init_method_std": model.init_std,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "bf16": is_bf16,
        "params_dtype": torch.bfloat16 if is_bf16 else torch.float32,
        "pipeline_dtype": torch.bfloat16 if is_bf16 else torch.float32,
        "use_cpu_initialization": not on_cuda,
        "finalize_model_grads_func": finalize_model_grads,
        # What only a GPU has.
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": on_cuda,
        "bias_dropout_fusion": on_cuda,
        "masked_softmax_fusion": on_cuda,
        "apply_rope_fusion": False,
    }
    return TransformerConfig(**{**fields, **changes})


def build_model(config: Config, transformer: TransformerConfig, dispatcher: str, on_cuda: bool) -> GPTModel:
    """The GPT, with weights that depend on the seed alone."""
    assert config.model is not None
    assert config.train is not None
    with_engine = transformer.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=with_engine, normalization="RMSNorm")
    if dispatcher == "moe_ep":
        spec = moe_ep_megatron.with_moe_ep(spec, config.moe.ep)
    torch.manual_seed(config.train.seed)
    if on_cuda:
        tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed + 1, force_reset_rng=True)
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=spec,
        vocab_size=config.model.vocab_size,
        max_sequence_length=config.model.max_seq_len,
        position_embedding_type="rope",
        rotary_base=int(config.model.rope_theta),
        share_embeddings_and_output_weights=False,
    )
    return model.cuda() if on_cuda else model


def train(config: Config, dispatcher: str, batch: Batch, on_cuda: bool, nudge: bool = False, **changes: Any) -> Curve:
    """Trains `config.train.steps` steps with one dispatcher. Collective over all ranks.

    Args:
        config: sections moe, model and train of this package.
        dispatcher: one of `DISPATCHERS`.
        batch: this rank's tokens.
        on_cuda: train on the current CUDA device.
        nudge: move weights by their last bit before the first step, to see how far rounding alone carries a curve.
        changes: fields of Megatron's TransformerConfig.
    """
    assert config.train is not None
    settings = config.train
    transformer = transformer_config(config, dispatcher, on_cuda, **changes)
    module = build_model(config, transformer, dispatcher, on_cuda)
    if nudge:
        source = torch.Generator().manual_seed(config.train.seed)
        with torch.no_grad():
            for weight in module.parameters():
                bits = torch.randint(-1, 2, weight.shape, generator=source).to(weight)
                weight *= 1 + bits * LAST_BIT
    if transformer.bf16:
        module = Float16Module(transformer, module)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    model = DistributedDataParallel(transformer, ddp_config, module)
    optimizer = get_megatron_optimizer(_optimizer_config(config), [model])
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=settings.lr, min_lr=settings.lr * settings.min_lr_ratio,
        lr_warmup_steps=settings.warmup_steps, lr_decay_steps=settings.steps, lr_decay_style="cosine",
        start_wd=settings.weight_decay, end_wd=settings.weight_decay, wd_incr_steps=0, wd_incr_style="constant",
    )  # fmt: skip
    curve = Curve()
    for step in range(settings.steps):
        loss, norm = _step(config, model, optimizer, _tokens(config, batch, step, on_cuda))
        scheduler.step(increment=1)
        curve.losses.append(loss)
        curve.grad_norms.append(norm)
    moe_ep_megatron.close_buffers(transformer)
    return curve


def num_micro_batches(config: Config) -> int:
    """Passes of a rank in one step."""
    assert config.train is not None
    per_rank = config.train.global_batch_size // torch.distributed.get_world_size()
    return per_rank // (config.train.micro_batch_size or per_rank)


def _step(config: Config, model: Any, optimizer: Any, tokens: Iterator[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    assert config.train is not None
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=tokens,
        model=[model],
        num_microbatches=num_micro_batches(config),
        seq_length=config.train.seq_len,
        micro_batch_size=config.train.micro_batch_size or 1,
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    return sum(float(loss["loss"]) for loss in losses) / len(losses), float(norm)


def _forward_step(tokens: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    inputs_BS, targets_BS = next(tokens)
    length, device = inputs_BS.shape[1], inputs_BS.device
    positions_BS = torch.arange(length, device=device).expand_as(inputs_BS)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)  # True is hidden
    return model(inputs_BS, positions_BS, mask, labels=targets_BS), _mean_loss


def _mean_loss(losses_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses_BS.float().mean()
    return loss, {"loss": loss.detach().clone()}  # Megatron scales its own in place


def _tokens(config: Config, batch: Batch, step: int, on_cuda: bool) -> Iterator[tuple[Tensor, Tensor]]:
    for micro_batch in range(num_micro_batches(config)):
        inputs_BS, targets_BS = batch(step, micro_batch)
        yield (inputs_BS.cuda(), targets_BS.cuda()) if on_cuda else (inputs_BS, targets_BS)


def _optimizer_config(config: Config) -> OptimizerConfig:
    assert config.train is not None
    settings = config.train
    is_bf16 = settings.dtype == "bfloat16"
    return OptimizerConfig(
        optimizer="adam", lr=settings.lr, min_lr=settings.lr * settings.min_lr_ratio,
        weight_decay=settings.weight_decay, adam_beta1=settings.beta1, adam_beta2=settings.beta2,
        clip_grad=settings.grad_clip, bf16=is_bf16, fp16=False, use_distributed_optimizer=False,
        params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
    )  # fmt: skip


def _has_transformer_engine() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True
