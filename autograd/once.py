"""A backward that may run once: differentiating it again raises a sentence instead of cutting the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Grads = TypeVar("Grads", bound="tuple[Tensor | None, ...]")


class _NotTwice(torch.autograd.Function):
    """The identity, with a backward that says why there is none."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, operation: str, *sources: Tensor) -> Tensor:
        ctx.operation = operation
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            f"moe_ep.{ctx.operation} is not differentiable twice: its backward is an exchange between ranks that "
            "records no graph. Do not differentiate through a gradient that passed it (create_graph=True)."
        )


def once_differentiable(operation: str) -> Callable[[Callable[..., Grads]], Callable[..., Grads]]:
    """Marks a `backward` static method; `operation` is the public name for the message."""

    def decorate(backward: Callable[..., Grads]) -> Callable[..., Grads]:
        @functools.wraps(backward)
        def guarded(ctx: Any, *grads: Tensor) -> Grads:
            with torch.no_grad():
                results = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return results
            # Someone builds a graph of the gradients (create_graph=True): let a second backward meet the sentence.
            # What the gradients were made from stays attached, so that a search for any of it meets the sentence too.
            sources = [source for source in (*grads, *ctx.saved_tensors) if source is not None and source.requires_grad]
            return tuple(  # type: ignore[return-value]
                None if result is None else _NotTwice.apply(result.detach().requires_grad_(), operation, *sources)  # type: ignore[no-untyped-call]
                for result in results
            )

        return guarded

    return decorate
