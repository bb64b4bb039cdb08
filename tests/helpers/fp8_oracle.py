"""The FP8 experts in float64, by formulas of their own: quantised inputs, exact products, gradients straight through.

Rows, inner activations (times the routing weight of their row) and weights are rounded to e4m3 as the product does;
sums, gradients and everything else are exact. So what is left between the two is the rounding of gradients to FP8 and
of sums to the dtype of the rows.

Letters: T tokens, H hidden, F ffn width, K slots a token, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _scale(amax: float, power_of_two: bool) -> float:
    scale = max(amax / 448.0, 2.0**-126)
    return 2.0 ** math.ceil(math.log2(scale)) if power_of_two else scale


def rounded(x: Tensor, high: int, wide: int, power_of_two: bool) -> Tensor:
    """Blocks of high x wide elements to e4m3 and back; the gradient passes as if nothing had happened."""
    out = torch.empty_like(x, dtype=torch.float64)
    values = x.detach().double()
    for i in range(0, x.shape[0], high):
        for j in range(0, x.shape[1], wide):
            block = values[i : i + high, j : j + wide]
            scale = _scale(float(block.abs().max()), power_of_two)
            out[i : i + high, j : j + wide] = (block / scale).float().to(torch.float8_e4m3fn).double() * scale
    return x + (out - x).detach()


def swiglu_moe(
    x_TH: Tensor,
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
    power_of_two: bool = True,
    weighs_inside: bool = True,
) -> Tensor:
    """y [T, H] float64, differentiable in x, weights and both matrices; every expert sees every token.

    Without `weighs_inside` the results of the experts are weighed, and the inner activations rounded without.
    """
    x_TH = rounded(x_TH.double(), 1, 128, power_of_two)
    y_TH = torch.zeros_like(x_TH)
    for expert, (gate_up, down) in enumerate(zip(gate_up_E2FH, down_EHF, strict=True)):
        projected = x_TH @ rounded(gate_up.double(), 128, 128, power_of_two).t()
        gate, up = projected.chunk(2, dim=1)
        weights_TK = torch.where(topk_idx_TK == expert, topk_weights_TK.double(), 0.0)
        for weight_T1 in weights_TK.split(1, dim=1):  # a row for each slot, also where two have one expert
            before, after = (weight_T1, 1.0) if weighs_inside else (1.0, weight_T1)
            inner = rounded(before * gate * torch.sigmoid(gate) * up, 1, 128, power_of_two)
            y_TH = y_TH + after * (inner @ rounded(down.double(), 128, 128, power_of_two).t())
    return y_TH


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; 0 where both are 0."""
    difference = float((actual.detach().double().cpu() - expected.detach().double().cpu()).norm())
    return difference / float(expected.detach().double().norm()) if difference else 0.0
