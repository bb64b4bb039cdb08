"""How the layers reach the kernels of csrc: whether they serve a tensor, and what a launch is given."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from moe_ep import _native

ALL_SMS: Final = 0  # the value of num_sms for the whole device


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def are_installed() -> bool:
    """Whether this install has the CUDA extension; a constant to torch.compile."""
    return _native.load() is not None


def serve(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether the kernels of this install take the tensor: on CUDA, in one of the dtypes."""
    return tensor.is_cuda and tensor.dtype in dtypes and are_installed()


def launch_on(tensor: Tensor) -> tuple[AbstractContextManager[Any], int]:
    """The device to make current around a launch, and the stream to launch on."""
    return torch.cuda.device(tensor.device), torch.cuda.current_stream(tensor.device).cuda_stream
