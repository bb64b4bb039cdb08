"""A router whose logits are its input: hidden size = number of experts and an identity weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ep.config import MoEConfig, RouterConfig
from moe_ep.layers.router import TopKRouter


def make_config(num_experts: int, hidden_size: int | None = None, **router: Any) -> MoEConfig:
    return MoEConfig(
        hidden_size=num_experts if hidden_size is None else hidden_size,
        ffn_hidden_size=4,
        num_experts=num_experts,
        router=RouterConfig(**router),
    )


def logit_router(num_experts: int, buffer: Any = None, **router: Any) -> TopKRouter:
    """With this router, `router(logits)` chooses by exactly these (finite) logits."""
    built = TopKRouter(make_config(num_experts, **router), buffer)
    with torch.no_grad():
        built.weight.copy_(torch.eye(num_experts))
    return built


def sigmoid_logits(scores: Sequence[float]) -> Tensor:
    """[1, E] logits whose sigmoids are the scores."""
    return torch.tensor([[math.log(score / (1.0 - score)) for score in scores]], dtype=torch.float32)


def softmax_logits(rows: Sequence[Sequence[float]]) -> Tensor:
    """[T, E] logits whose softmax rows are the given probabilities (each row sums to 1)."""
    return torch.tensor([[math.log(value) for value in row] for row in rows], dtype=torch.float32)


def set_bias(router: TopKRouter, bias: Sequence[float]) -> None:
    assert router.expert_bias is not None
    router.expert_bias.copy_(torch.tensor(bias))


def assert_close(actual: Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance)
