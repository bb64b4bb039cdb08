"""One training run: the step, the validation loss, and what is saved.

The loss is the mean over the global batch, whatever the number of ranks. Each rank computes the mean over its own
sequences; `moe_ep.parallel.reduce_gradients` turns that into the gradient of the whole mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from moe_ep import ConfigError, load_checkpoint, save_checkpoint
from moe_ep.config import ModelConfig, MoEConfig, TrainConfig
from moe_ep.parallel import clip_grad_norm, reduce_gradients

from .data import Corpus, train_starts, validation_starts, windows
from .model import Transformer
from .ranks import Ranks


@dataclass
class StepResult:
    """What one optimizer step did, on this rank until `Trainer.metrics` sums it.

    Attributes:
        loss: mean over this rank's sequences, nats per byte.
        tokens_per_expert: [layers, E] int64, routed pairs of this rank's tokens, before capacity drops.
        dropped: pairs of this rank's tokens dropped by the capacity limit.
        aux_losses: name to mean over the passes, summed over the layers.
        grad_norm: of the whole gradient before clipping, the same on all ranks.
        lr: learning rate of the step.
    """

    loss: Tensor
    tokens_per_expert: Tensor
    dropped: Tensor
    aux_losses: dict[str, Tensor]
    grad_norm: float
    lr: float


def check_batch(train: TrainConfig, num_ranks: int) -> None:
    """The global batch splits evenly over the ranks, and a rank's part into micro batches.

    Raises:
        ConfigError: it does not.
    """
    if train.global_batch_size % num_ranks:
        below = train.global_batch_size // num_ranks * num_ranks
        near = f"{below} or {below + num_ranks}" if below else str(num_ranks)
        raise ConfigError(
            f"train.global_batch_size is {train.global_batch_size}, which does not split evenly over {num_ranks} ranks;"
            f" set it to {near}, or start another number of ranks."
        )
    local = train.global_batch_size // num_ranks
    if train.micro_batch_size is not None and local % train.micro_batch_size:
        raise ConfigError(
            f"train.micro_batch_size is {train.micro_batch_size}, which does not divide the {local} sequences of a rank"
            f" (train.global_batch_size = {train.global_batch_size} over {num_ranks} ranks); set it to a divisor of "
            f"{local}, or leave it out."
        )


class Trainer:
    """Model, optimizer and data of one rank.

    Args:
        moe, model, train: the sections of the configuration.
        ranks: this process among all.
        corpus: the bytes to learn and to validate on.
    """

    def __init__(self, moe: MoEConfig, model: ModelConfig, train: TrainConfig, ranks: Ranks, corpus: Corpus) -> None:
        check_batch(train, ranks.num_ranks)
        self.train_config, self.ranks, self.corpus = train, ranks, corpus
        torch.manual_seed(train.seed)  # the same on every rank, and nothing random after the model
        self.model = Transformer(model, moe, ranks.ep_group, train.recompute).to(ranks.device)
        self.moe_layers = self.model.moe_layers()
        self.num_experts = moe.num_experts
        self.parameters = list(self.model.parameters())
        self.optimizer = self._make_optimizer()

    # -- training -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def try_out(self) -> None:
        """One micro batch through the model, as an evaluation does it, so that what a layer or the exchange refuses is
        refused before training. Changes nothing. Collective.

        Raises:
            ConfigError: it was refused.
        """
        self.model.eval()
        try:
            float(self._loss(self.corpus.validation, self._micro_batches(self._mine(self.validation_batches()[0]))[0]))
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error
        self.model.buffer.check()

    def step(self, step: int) -> StepResult:
        """Optimizer step number `step` (the first one is 1). Collective.

        Raises:
            RuntimeError: the gradient is not finite, on all ranks alike; no parameter was changed.
        """
        train = self.train_config
        starts = train_starts(len(self.corpus.train), train.seed, step, train.global_batch_size, train.seq_len)
        micros = self._micro_batches(self._mine(starts))
        self.model.train()
        for layer in self.moe_layers:
            layer.router.aux_loss_scale = 1.0 / len(micros)  # the main loss is divided by the same number
        loss, dropped, aux_losses = torch.zeros(()), torch.zeros(()), {}
        for micro in micros:
            part = self._loss(self.corpus.train, micro) / len(micros)
            part.backward()
            loss = part.detach() + loss.to(part.device)
            for layer in self.moe_layers:
                stats = layer.routing_stats()
                dropped = stats["dropped"] + dropped.to(part.device)
                for name in layer.router.last_losses:
                    aux_losses[name] = stats[name] / len(micros) + aux_losses.get(name, 0.0)
        counts = [layer.router.tokens_per_expert.clone() for layer in self.moe_layers]
        grad_norm, lr = self._update(step)
        tokens_per_expert = torch.stack(counts) if counts else torch.zeros(0, self.num_experts)
        return StepResult(loss, tokens_per_expert, dropped, aux_losses, grad_norm, lr)

    def _update(self, step: int) -> tuple[float, float]:
        """Turns the gradients of all ranks into one step; (gradient norm, learning rate)."""
        reduce_gradients(self.parameters, self.ranks.world, self.ranks.expert_group)
        norm = float(clip_grad_norm(self.parameters, self.train_config.grad_clip, self.ranks.ep_group))
        self.model.buffer.check()  # faults of calls that did not wait must not reach the parameters
        if not math.isfinite(norm):
            raise RuntimeError(
                f"step {step}: the gradient norm is {norm}; no parameter was changed. Lower train.lr or raise "
                "train.warmup_steps and continue from the last checkpoint with --resume."
            )
        lr = learning_rate(self.train_config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for layer in self.moe_layers:
            layer.update_expert_bias(self.ranks.world)
        return norm, lr

    def metrics(self, result: StepResult) -> dict[str, Any]:
        """`result` over all ranks, ready for JSON. Collective."""
        names = sorted(result.aux_losses)
        parts = [result.loss, result.dropped, *(result.aux_losses[name] for name in names)]
        counts = result.tokens_per_expert
        flat = torch.stack([torch.as_tensor(part, device=self.ranks.device).double() for part in parts])
        flat = self.ranks.sum(torch.cat([flat, counts.double().flatten().to(flat.device)])).cpu()
        counts_LE = flat[len(parts) :].view(-1, self.num_experts)
        values = flat[: len(parts)].tolist()
        num_ranks = self.ranks.num_ranks
        return {
            "loss": values[0] / num_ranks,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "dropped": int(values[1]),
            "max_over_mean_load": [float(row.max() / row.mean().clamp(min=1e-30)) for row in counts_LE],
            "aux_losses": {name: value / num_ranks for name, value in zip(names, values[2:], strict=True)},
            "tokens_per_expert": counts_LE.long().tolist(),
        }

    # -- validation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean over the validation sequences of all ranks, nats per byte. Collective."""
        train = self.train_config
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for starts in self.validation_batches():
            for micro in self._micro_batches(self._mine(starts)):
                total += self._loss(self.corpus.validation, micro).double() * len(micro)
        return float(self.ranks.sum(total)) / (train.eval_batches * train.global_batch_size)

    def validation_batches(self) -> list[NDArray[np.int64]]:
        """Where the validation sequences begin: `eval_batches` global batches, the same at every evaluation."""
        train = self.train_config
        num_sequences = train.eval_batches * train.global_batch_size
        return np.split(
            validation_starts(len(self.corpus.validation), num_sequences, train.seq_len), train.eval_batches
        )

    @contextmanager
    def without_routed_experts(self) -> Iterator[None]:
        """Inside, the routed experts answer 0 to every row; the shared expert and all else stay."""
        hooks = [layer.experts.register_forward_hook(_zeros) for layer in self.moe_layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: Path, step: int) -> None:
        """Writes model, optimizer and step number. Collective."""
        save_checkpoint(folder, self.model, self.optimizer, {"step": step, "data": self.corpus.fingerprint()})

    def load(self, folder: Path) -> dict[str, Any]:
        """Reads what `save` wrote at any EP size; its "step" and "data". Collective.

        Raises:
            ConfigError: the checkpoint is of another model.
        """
        try:
            return load_checkpoint(folder, self.model, self.optimizer)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    # -- parts --------------------------------------------------------------------------------------------------------

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW; weight decay on matrices only. One fused kernel on the CPU, where the loop over tensors is slow."""
        train = self.train_config
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        on_cpu = self.ranks.device.type == "cpu"
        return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=on_cpu)

    def _mine(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """This rank's part of a global batch."""
        size = len(starts) // self.ranks.num_ranks
        return starts[self.ranks.rank * size : (self.ranks.rank + 1) * size]

    def _micro_batches(self, starts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        return np.split(starts, len(starts) // (self.train_config.micro_batch_size or len(starts)))

    def _loss(self, part: NDArray[np.uint8], starts: NDArray[np.int64]) -> Tensor:
        """Mean cross-entropy, nats per byte, float32."""
        device = self.ranks.device
        inputs, targets = (t.to(device) for t in windows(part, starts, self.train_config.seq_len))
        with torch.autocast(device.type, torch.bfloat16, enabled=self.train_config.dtype == "bfloat16"):
            logits = self.model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def learning_rate(train: TrainConfig, step: int) -> float:
    """Linear from 0 over the warm-up steps, then half a cosine down to `min_lr_ratio` at the last step."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    progress = (step - train.warmup_steps) / max(train.steps - train.warmup_steps, 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return train.lr * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * cosine)


def _zeros(module: nn.Module, inputs: tuple[Any, ...], rows_RH: Tensor) -> Tensor:
    return torch.zeros_like(rows_RH)
