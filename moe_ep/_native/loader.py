"""Finds the CUDA extension `moe_ep._C`, which is there only where nvcc was at install time.

This module and the extension import everywhere, also without a GPU and without a driver; only a call needs a GPU.
"""

import functools
import importlib
from typing import Protocol, cast

from moe_ep._native.exchange import ExchangeKernels
from moe_ep._native.fp8 import Fp8Kernels
from moe_ep._native.layer import LayerKernels
from moe_ep._native.low_latency import LowLatencyKernels
from moe_ep._native.rail import RailKernels


class NativeKernels(LayerKernels, Fp8Kernels, ExchangeKernels, LowLatencyKernels, RailKernels, Protocol):
    """What `moe_ep._C` offers. Pointers and streams are integers (`Tensor.data_ptr()`, `Stream.cuda_stream`).

    The contract of each function (shapes, dtypes, ownership, order) is in the header of its launch function in csrc/.
    All of them raise RuntimeError with a sentence and return without waiting for the device.
    """

    cuda_archs: str
    """The GPU architectures that were compiled in, as in "sm_80+sm_90a"."""

    def fp8_cast_1x128(
        self,
        *,
        x: int,
        dtype: str,
        q: int,
        scales: int,
        num_tokens: int,
        hidden: int,
        power_of_two: bool,
        num_sms: int,
        stream: int,
    ) -> None:
        """Cast rows to e4m3 with a scale per 1x128 block; csrc/fp8/cast.h."""

    def layout_count(
        self,
        *,
        topk_idx: int,
        idx_bytes: int,
        rank_of_expert: int,
        tokens_per_expert: int,
        tokens_per_rank: int,
        is_token_in_rank: int,
        bad_id: int,
        num_tokens: int,
        num_topk: int,
        num_experts: int,
        num_ranks: int,
        num_sms: int,
        stream: int,
    ) -> None:
        """Count tokens per expert and per rank; csrc/layer/layout_count.h."""


@functools.cache
def load() -> NativeKernels | None:
    """The extension, or None where this install was made without nvcc.

    An extension that is there and does not load is an error of its own, and its ImportError passes through.
    """
    try:
        module = importlib.import_module("moe_ep._C")
    except ModuleNotFoundError as error:
        if error.name != "moe_ep._C":
            raise
        return None
    return cast(NativeKernels, module)


def require() -> NativeKernels:
    """The extension, for a caller who asked for a CUDA path.

    Raises:
        RuntimeError: the install has no extension; the message says how to get it.
    """
    kernels = load()
    if kernels is None:
        raise RuntimeError(
            "The CUDA kernels of moe_ep are not in this install: moe_ep._C is missing, because no nvcc was used when "
            'it was installed. Install the CUDA toolkit (12.0 or newer) and run "MOE_EP_BUILD_CUDA=1 pip install ." '
            'again, or choose backend="torch", which needs no kernels.'
        )
    return kernels


def describe() -> str:
    """How this install was made, for people: "with CUDA kernels for sm_80, sm_90a" or "as pure Python, ..."."""
    kernels = load()
    if kernels is None:
        return "as pure Python, without CUDA kernels: no nvcc was used"
    return f"with CUDA kernels for {kernels.cuda_archs.replace('+', ', ')}"
