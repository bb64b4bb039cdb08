"""The experts of a low-latency call: a masked grouped GEMM over fixed places.

Letters: L local experts, N places an expert, H hidden, F width of an expert.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from moe_ep.fp8 import dequantize_1x128, quantize_1x128

BLOCK = 128


class MaskedExperts(nn.Module):
    """L experts, `w2(silu(w1 x))`, over the places [L, N, H] that `low_latency_dispatch` fills.

    Places without a row are computed too, or not: nobody reads them. The first product takes the FP8 rows and scales as
    they came and `recv_count` as its mask, if DeepGEMM is installed (`m_grouped_fp8_gemm_nt_masked`); otherwise PyTorch
    multiplies all places.
    """

    def __init__(
        self, num_local: int, hidden: int, width: int, generator: torch.Generator, device: torch.device
    ) -> None:
        super().__init__()
        up = torch.randn(num_local, width, hidden, generator=generator) / hidden**0.5
        down = torch.randn(num_local, hidden, width, generator=generator) / width**0.5
        self.up = nn.Parameter(up.bfloat16().to(device), requires_grad=False)
        self.down = nn.Parameter(down.bfloat16().to(device), requires_grad=False)
        self.uses_deep_gemm = device.type == "cuda" and importlib.util.find_spec("deep_gemm") is not None
        if self.uses_deep_gemm:
            self.up_fp8, self.up_scales = cast_blocks(self.up)

    def forward(self, received: tuple[Tensor, Tensor], recv_count: Tensor, expected_rows: int) -> Tensor:
        """[L, N, H] bfloat16.

        Args:
            received: FP8 rows [L, N, H] and scales [L, N, H / 128].
            recv_count: [L] int32, rows of each expert.
            expected_rows: of an expert, on average; a hint for DeepGEMM.
        """
        codes, scales = received
        if self.uses_deep_gemm:
            import deep_gemm

            inner = torch.empty(*codes.shape[:2], self.up.shape[1], dtype=torch.bfloat16, device=codes.device)
            weights = (self.up_fp8, self.up_scales)
            deep_gemm.m_grouped_fp8_gemm_nt_masked((codes, scales), weights, inner, recv_count, expected_rows)
        else:
            rows = dequantize_1x128(codes.flatten(0, 1), scales.flatten(0, 1).contiguous()).view(codes.shape)
            inner = torch.bmm(rows, self.up.transpose(1, 2))
        return torch.bmm(nn.functional.silu(inner), self.down.transpose(1, 2))


def cast_blocks(weights: Tensor) -> tuple[Tensor, Tensor]:
    """[L, F, H] as e4m3 with one scale per 128 x 128 block [L, F / 128, H / 128]."""
    num_local, width, hidden = weights.shape
    tiles = weights.view(num_local, width // BLOCK, BLOCK, hidden // BLOCK, BLOCK).transpose(2, 3)
    codes, scales = quantize_1x128(tiles.reshape(-1, BLOCK))
    largest = scales.view(*tiles.shape[:3], BLOCK).amax(-1)
    codes = (tiles.float() / largest[..., None, None]).to(torch.float8_e4m3fn)
    return codes.transpose(2, 3).reshape(weights.shape), largest
