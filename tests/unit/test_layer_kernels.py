"""The layer's kernels as far as they need no GPU: what they refuse, where they step aside, what recompute keeps."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from moe_ep import _native
from moe_ep.layers import kernels, routing_kernel, swiglu
from moe_ep.layers.weighted_swiglu import weighted_swiglu_backward_op, weighted_swiglu_op
from moe_ep.layers.wrap import keep_exchange
from tests.unit.router_helpers import make_config

needs_extension = pytest.mark.skipif(
    importlib.util.find_spec("moe_ep._C") is None, reason="needs moe_ep._C, which this install was made without"
)

ROUTE = dict.fromkeys(
    ["logits", "expert_bias", "padding_mask", "topk_idx", "topk_weights", "probs", "counts", "num_sms", "stream"], 0
)
ROUTE_SIZES = {"num_tokens": 4, "num_experts": 8, "num_topk": 2, "num_groups": 0, "group_topk": 0, "num_best": 0}


@needs_extension
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 1025}, r"logits are \[4, 1025\].*at most 1024 experts"),
        ({"num_tokens": -1}, r"logits are \[-1, 8\], but at least \[0, 1\]"),
        ({"num_topk": 9}, "topk is 9, but 1 to 64 of the 8 experts"),
        ({"num_topk": 0}, "topk is 0, but 1 to 64"),
        ({"num_groups": 3}, r"num_groups is 3, but must be 0 \(none\) or divide the 8 experts"),
        ({"num_groups": 4, "group_topk": 5, "num_best": 2}, "group_topk is 5 and num_best is 2 with 4 groups"),
        ({"num_sms": -1}, r"num_sms is -1, but the least is 0 \(all\)"),
        ({"score_function": "tanh"}, "score_function is tanh, but softmax, softmax_of_chosen and sigmoid"),
    ],
)
def test_routing_refuses_impossible_settings_before_any_launch(change: dict[str, int | str], message: str) -> None:
    arguments = {**ROUTE, **ROUTE_SIZES, "score_function": "softmax", **change}
    with pytest.raises(RuntimeError, match=message):
        _native.require().topk_route(**arguments, normalize=False, scaling_factor=1.0)


@needs_extension
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "dtype float64, but bfloat16, float16 and float32"),
        ({"ffn": 0}, r"the rows are \[4, 0\], but at least \[0, 1\]"),
        ({"num_sms": -2}, r"num_sms is -2, but the least is 0 \(all\)"),
    ],
)
def test_swiglu_refuses_impossible_sizes_before_any_launch(change: dict[str, int | str], message: str) -> None:
    arguments = {"dtype": "float32", "num_rows": 4, "ffn": 8, "num_sms": 0, **change}
    with pytest.raises(RuntimeError, match=message):
        _native.require().swiglu(projected=0, out=0, num_rows_device=0, stream=0, **arguments)
    with pytest.raises(RuntimeError, match=message):
        _native.require().swiglu_backward(
            projected=0, grad_out=0, grad_projected=0, num_rows_device=0, stream=0, **arguments
        )
    addresses = {"projected": 0, "row_weights": 0, "num_rows_device": 0, "stream": 0}
    with pytest.raises(RuntimeError, match=message):
        _native.require().weighted_swiglu(out=0, **addresses, **arguments)
    with pytest.raises(RuntimeError, match=message):
        _native.require().weighted_swiglu_backward(
            grad_out=0, grad_projected=0, grad_weights=0, **addresses, **arguments
        )


def test_tensors_on_the_cpu_take_the_formulas() -> None:
    assert not routing_kernel.serves(torch.zeros(2, 8), make_config(8, topk=2).router)
    assert not swiglu.serves(torch.zeros(2, 8))


def test_whether_kernels_are_installed_is_a_constant_in_a_compiled_graph() -> None:
    def double_or_same(x: Tensor) -> Tensor:
        return x if kernels.are_installed() else 2 * x

    compiled = torch.compile(double_or_same, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), double_or_same(torch.ones(3)))


def test_selective_checkpointing_keeps_the_choice_of_the_kernel() -> None:
    assert keep_exchange(None, routing_kernel.route_op._opoverload) == CheckpointPolicy.MUST_SAVE
    assert keep_exchange(None, swiglu.swiglu_op._opoverload) == CheckpointPolicy.PREFER_RECOMPUTE
    assert keep_exchange(None, weighted_swiglu_op._opoverload) == CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("needs_probs", [False, True])
def test_the_custom_ops_know_their_shapes_without_a_gpu(needs_probs: bool) -> None:
    with torch.device("meta"):
        logits, projected = torch.zeros(5, 8), torch.zeros(3, 4, 12, dtype=torch.bfloat16)
    settings = ("sigmoid", 2, True, 1.0)
    ids, weights, probs, counts = routing_kernel.route_op(logits, None, None, needs_probs, *settings, 4, 2, 2)
    assert (ids.shape, ids.dtype) == ((5, 2), torch.int64)
    assert (weights.shape, weights.dtype) == ((5, 2), torch.float32)
    assert probs.shape == ((5, 8) if needs_probs else (0, 8))
    assert (counts.shape, counts.dtype) == ((8,), torch.int64)
    assert routing_kernel.route_backward_op(logits, ids, weights, None, *settings).shape == (5, 8)
    out = swiglu.swiglu_op(projected, None)
    assert (out.shape, out.dtype) == ((3, 4, 6), torch.bfloat16)
    assert swiglu.swiglu_backward_op(projected, out, None).shape == projected.shape
    rows, weights = projected[0], torch.zeros(4, device="meta")
    out = weighted_swiglu_op(rows, weights, None)
    assert (out.shape, out.dtype) == ((4, 6), torch.bfloat16)
    gradients = weighted_swiglu_backward_op(rows, weights, out, None)
    assert [(gradient.shape, gradient.dtype) for gradient in gradients] == [
        (rows.shape, torch.bfloat16),
        (weights.shape, torch.float32),
    ]
