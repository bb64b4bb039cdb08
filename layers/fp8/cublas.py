"""FP8 products straight through cuBLASLt (csrc/fp8/products.h): the ones that Transformer Engine would launch.

A step of 32 experts has 192 products. Transformer Engine describes each anew, in Python and C++, and asks cuBLASLt for
an algorithm; here one call has the addresses of all products of a group, and the algorithm of a shape is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep._native.arguments import dtype_name
from moe_ep._native.fp8 import Fp8Products
from moe_ep.fp8.matrix import Fp8Matrices

_WORKSPACE_BYTES: Final = 32 * 1024 * 1024  # of each stream, what cuBLAS asks for on Hopper


class CublasGemm:
    """One cuBLASLt product a pair, on several streams; see `moe_ep.layers.fp8.gemm.GroupedGemm`."""

    name = "cublas"

    def __call__(self, a: Fp8Matrices, b: Fp8Matrices, outs: Sequence[Tensor]) -> None:
        sizes: list[int] = []
        pointers: list[int] = []
        for left, left_scales, right, right_scales, out in zip(a.codes, a.scales, b.codes, b.scales, outs, strict=True):
            if right.numel():
                sizes += (left.shape[0], *right.shape)
                pointers += (left.data_ptr(), left_scales.data_ptr(), right.data_ptr(), right_scales.data_ptr())
                pointers.append(out.data_ptr())
            else:
                out.zero_()
        if not sizes:
            return
        device = outs[0].device
        with torch.cuda.device(device):
            _products(device.index)[0].multiply(
                sizes=sizes,
                pointers=pointers,
                a_scaling=a.scaling,
                a_is_e5m2=a.dtype == torch.float8_e5m2,
                b_scaling=b.scaling,
                b_is_e5m2=b.dtype == torch.float8_e5m2,
                out_dtype=dtype_name(outs[0].dtype),
                stream=torch.cuda.current_stream().cuda_stream,
            )


@functools.cache
def _products(device_idx: int) -> tuple[Fp8Products, Tensor]:
    """What all layers on a device share, with the workspaces, which it reads."""
    make = _native.require().Fp8Products
    workspaces = torch.empty(make.num_streams, _WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device_idx}")
    addresses = [workspace.data_ptr() for workspace in workspaces]
    return make(workspaces=addresses, workspace_bytes=_WORKSPACE_BYTES), workspaces


def why_unavailable(recipe: str) -> str | None:
    """Why this machine cannot run the recipe so, as the middle of a sentence; None if it can."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability != (9, 0):
        found = "no CUDA GPU" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        return f"moe.fp8.gemm cublas needs a GPU of compute capability 9.0, and this machine has {found}"
    if recipe == "mxfp8":
        return "this version casts to 1x128 blocks and to whole tensors only, not to the 1x32 blocks of mxfp8"
    kernels = _native.load()
    if kernels is None:
        return "moe_ep._C, which this install was made without, is needed for moe.fp8.gemm cublas"
    return kernels.fp8_products_obstacle() or None
