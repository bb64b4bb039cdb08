"""The seam between the FP8 experts and what multiplies FP8 matrices: Transformer Engine, cuBLASLt, or PyTorch.

Every product of the FP8 path goes through one `GroupedGemm`, so a test that watches it sees them all.

Letters: N, M rows of the two operands, K the reduction dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moe_ep.config import FP8Config
from moe_ep.errors import ConfigError
from moe_ep.fp8.matrix import Fp8Matrices
from moe_ep.integrations import transformer_engine
from moe_ep.layers.fp8 import cublas


class GroupedGemm(Protocol):
    """Multiplies pairs of FP8 matrices."""

    name: str

    def __call__(self, a: Fp8Matrices, b: Fp8Matrices, outs: Sequence[Tensor]) -> None:
        """outs[i] = b[i] @ a[i].T, for all i.

        Args:
            a: [M, K] each.
            b: [N, K] each. N and K may be 0; the product over nothing is zero.
            outs: [N, M] each, contiguous, in bfloat16, float16 or float32; written whole.
        """


class PlainGemm:
    """Products of the dequantised matrices in float32, on any device: what FP8 tensor cores compute, slowly."""

    name = "plain"

    def __call__(self, a: Fp8Matrices, b: Fp8Matrices, outs: Sequence[Tensor]) -> None:
        for a_MK, b_NK, out_NM in zip(a, b, outs, strict=True):
            # Outside of autocast, which would round the operands again.
            with torch.autocast(out_NM.device.type, enabled=False):
                out_NM.copy_(b_NK.dequantize() @ a_MK.dequantize().t())


class TransformerEngineGemm:
    """`general_grouped_gemm` of Transformer Engine, FP8 tensor cores, one cuBLAS product a pair on several streams."""

    name = "te"

    def __call__(self, a: Fp8Matrices, b: Fp8Matrices, outs: Sequence[Tensor]) -> None:
        transformer_engine.require().grouped_gemm(a, b, outs)


def make_gemm(config: FP8Config) -> GroupedGemm:
    """The GEMM that `fp8.gemm` names.

    Raises:
        ConfigError: this machine cannot run it, or not the recipe.
    """
    if config.gemm == "plain" and config.recipe != "mxfp8":
        return PlainGemm()
    is_te = config.gemm != "cublas"
    obstacle = (transformer_engine if is_te else cublas).why_unavailable(config.recipe)
    if obstacle is not None:
        other = (
            "moe.fp8.recipe to blockwise"
            if config.recipe == "mxfp8"
            else "moe.fp8.gemm to plain, which runs anywhere (slowly)"
        )
        raise ConfigError(
            f"moe.fp8.recipe is {config.recipe!r}, but {obstacle}. Or set {other}, or set moe.fp8.recipe to none."
        )
    return TransformerEngineGemm() if is_te else cublas.CublasGemm()
