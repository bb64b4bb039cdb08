"""Tensors and dtypes as csrc takes them: an address as an integer, a name as text."""

from __future__ import annotations

import torch
from torch import Tensor


def address(tensor: Tensor | None) -> int:
    """What a kernel gets for a tensor; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def dtype_name(dtype: torch.dtype) -> str:
    """The name by which csrc knows a dtype, as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
