"""Lets Megatron-Core run on CPU and gloo: stand-ins for the names of torch.cuda that its constructors ask for.

Megatron-Core 0.16 to 0.19 has no CPU mode, but its computations are ordinary PyTorch. Nothing here changes a result:
streams and events are empty because a CPU has one order of work, and two places of 0.16 are mended that only matter
without Transformer Engine or CUDA. `moe_ep` itself needs none of this.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Stream:
    """A stream or an event of a device that has one order of work."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name in ("wait_stream", "wait_event", "record_event", "synchronize", "record", "wait"):
            return lambda *args, **kwargs: self
        raise AttributeError(name)


class _CudaMeansCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


@contextlib.contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def stand_in_for_cuda() -> None:
    """Replaces, in this process, what Megatron-Core asks of torch.cuda. Call it before importing Megatron."""
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()
    cuda.stream = _nothing
    cuda.synchronize = lambda *args: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    stock_type = torch.Tensor.type  # clipping compares the name of the type with that of CUDA

    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found: Any = stock_type(self, *args, **kwargs)
        is_cpu = isinstance(found, str) and "cuda" not in found
        return found.replace("torch.", "torch.cuda.") if is_cpu else found

    tensor.type = type_of
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    _CudaMeansCpu().__enter__()
    torch._dynamo.config.disable = True  # Megatron compiles some of its functions, which here only takes time


def mend_megatron() -> None:
    """The places in Megatron-Core that assume CUDA or Transformer Engine. Call it after importing Megatron."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # 0.16: names that exist only where Transformer Engine does are read without it.
    for name in ("te_general_gemm", "fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss"):
        if not hasattr(moe_utils, name):
            setattr(moe_utils, name, None)

    # The split sizes of all-to-all must be Python ints; Megatron makes them such only on their way from a GPU.
    stock = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = stock(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and isinstance(moved, torch.Tensor) else moved

    token_dispatcher.maybe_move_tensor_to_cpu = move
    random.CudaRNGStatesTracker.fork = _nothing
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    for module in ("megatron.core.transformer.moe.router", "megatron.core.distributed.param_and_grad_buffer"):
        importlib.import_module(module)
