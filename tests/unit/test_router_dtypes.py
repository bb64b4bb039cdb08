"""Dtypes of the router: autocast, casts of the module, the bias in checkpoints; refused inputs."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from moe_ep.layers.router import TopKRouter
from moe_ep.layers.router_gemm import router_logits
from tests.helpers.compare import assert_same_bits
from tests.unit.router_helpers import logit_router, make_config, set_bias


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "to", "to_with_device"])
def test_bias_stays_float32_and_small_steps_add_up(cast: str) -> None:
    """Case B04: bias 1.0 and five steps of 0.001, through casts and a state dict round trip."""
    config = make_config(2, topk=1, score_function="sigmoid", expert_bias=True, bias_update_rate=1e-3)
    model = torch.nn.Sequential(TopKRouter(config))
    set_bias(model[0], [1.0, 1.0])
    if cast == "to":
        model.to(torch.bfloat16)
    elif cast == "to_with_device":
        model.to("cpu", torch.float16)
    else:
        getattr(model, cast)()
    for _ in range(5):
        model[0].tokens_per_expert.copy_(torch.tensor([1, 3]))
        model[0].update_expert_bias()
        assert model[0].expert_bias.dtype == torch.float32
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    fresh = torch.nn.Sequential(TopKRouter(config)).bfloat16()
    fresh.load_state_dict(torch.load(stream))
    for router in (model[0], fresh[0]):
        assert router.expert_bias.dtype == torch.float32
        assert router.expert_bias[0].item() == pytest.approx(1.005, abs=1e-6)
        assert router.expert_bias[1].item() == pytest.approx(0.995, abs=1e-6)
    assert model[0].weight.dtype != torch.float32


def test_bias_survives_a_checkpoint_bit_for_bit_in_a_bf16_model() -> None:
    """Case M03."""
    config = make_config(4, topk=2, score_function="sigmoid", expert_bias=True)
    torch.manual_seed(0)
    router = TopKRouter(config).bfloat16()
    set_bias(router, [0.003, -0.001, 0.0, -0.002])
    state = router.state_dict()
    assert sorted(state) == ["expert_bias", "weight"]
    assert state["expert_bias"].dtype == torch.float32
    fresh = TopKRouter(config).bfloat16()
    fresh.load_state_dict(state, strict=True)
    assert router.expert_bias is not None
    assert fresh.expert_bias is not None
    assert torch.equal(router.expert_bias, fresh.expert_bias)
    x = torch.randn(64, 4, dtype=torch.bfloat16)
    assert torch.equal(router(x)[0], fresh(x)[0])
    assert torch.equal(router(x)[1], fresh(x)[1])
    del state["expert_bias"]
    with pytest.raises(RuntimeError, match="expert_bias"):
        TopKRouter(config).load_state_dict(state, strict=True)


def test_an_assigned_bf16_bias_becomes_float32() -> None:
    """Case B04, load with assign=True."""
    router = logit_router(2, topk=1, score_function="sigmoid", expert_bias=True)
    state = {name: value.bfloat16() for name, value in router.state_dict().items()}
    router.load_state_dict(state, assign=True)
    assert router.expert_bias is not None
    assert router.expert_bias.dtype == torch.float32


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_scores_are_float32_or_wider_and_gradients_keep_their_dtypes_under_autocast(
    x_dtype: torch.dtype, weight_dtype: torch.dtype, backward_inside: bool
) -> None:
    """Case N02: autocast changes no bit of the router."""
    torch.manual_seed(0)
    router = TopKRouter(make_config(8, hidden_size=16, topk=2, aux_loss_coef=0.1, z_loss_coef=0.1)).to(weight_dtype)
    x = torch.randn(5, 16).to(x_dtype).requires_grad_()
    plain_ids, plain_weights = router(x)
    (plain_weights * torch.tensor([1.0, 2.0])).sum().backward()
    assert x.grad is not None
    assert router.weight.grad is not None
    plain_dx, plain_dw = x.grad, router.weight.grad
    x.grad = router.weight.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        ids, weights = router(x)
        loss = (weights * torch.tensor([1.0, 2.0])).sum()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    assert weights.dtype == (torch.float64 if x_dtype == torch.float64 else torch.float32)
    assert torch.equal(ids, plain_ids)
    assert torch.equal(weights, plain_weights)
    assert x.grad is not None
    assert router.weight.grad is not None
    assert x.grad.dtype == x_dtype
    assert router.weight.grad.dtype == weight_dtype
    assert torch.equal(x.grad, plain_dx)
    assert torch.equal(router.weight.grad, plain_dw)


def test_deepcopy_has_its_own_parameters_and_the_same_routing() -> None:
    """Case P09, the router's part; also after a forward with losses."""
    router = logit_router(4, topk=2, aux_loss_coef=0.1, score_function="sigmoid", expert_bias=True)
    x = torch.randn(6, 4)
    router(x)[1].sum().backward()
    twin = copy.deepcopy(router)
    assert torch.equal(router(x)[1], twin(x)[1])
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(router.weight, torch.eye(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_compiled_router_gemm_has_eagers_gradients(dtype: torch.dtype) -> None:
    """Case O01. PyTorch 2.11 gave none at all where the forward of a Function ended with a cast that does nothing."""
    torch._dynamo.reset()
    results = []
    for function in (router_logits, torch.compile(router_logits, backend="aot_eager", fullgraph=True)):
        g = torch.Generator().manual_seed(0)
        leaves = [torch.randn(size, 8, generator=g).to(dtype).requires_grad_() for size in (5, 4)]
        results.append(torch.autograd.grad(function(*leaves).square().sum(), leaves))
    for name, eager, compiled in zip(("dx", "dweight"), *results, strict=True):
        assert bool(eager.any())
        assert_same_bits(compiled, eager, name)


def test_no_tokens_is_an_ordinary_input() -> None:
    """Case E01, the router's part: zero gradients, not None, and losses of exactly 0."""
    router = logit_router(
        4, topk=2, aux_loss_coef=0.1, seq_aux_loss_coef=0.1, global_aux_loss_coef=0.1, z_loss_coef=0.1,
        num_groups=2, group_topk=1, capacity_factor=1.0,
    )  # fmt: skip
    x = torch.zeros(0, 4, requires_grad=True)
    ids, weights = router(x, sequence_idx=torch.zeros(0, dtype=torch.int64))
    assert ids.shape == weights.shape == (0, 2)
    weights.sum().backward()
    assert router.weight.grad is not None
    assert (router.weight.grad == 0).all()
    assert x.grad is not None
    assert len(router.last_losses) == 4
    assert all(value.item() == 0.0 for value in router.last_losses.values())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"x_TH": torch.zeros(2, 5)}, r"\[2, 5\]"),
        ({"x_TH": torch.zeros(2, 2, 4)}, r"\[2, 2, 4\]"),
        ({"x_TH": torch.zeros(2, 4, dtype=torch.int64)}, "int64"),
        ({"x_TH": torch.zeros(2, 4), "padding_mask": torch.zeros(3, dtype=torch.bool)}, r"padding_mask is \[3\]"),
        ({"x_TH": torch.zeros(2, 4), "padding_mask": torch.zeros(2)}, "padding_mask is .*float32"),
        ({"x_TH": torch.zeros(2, 4), "sequence_idx": torch.zeros(2)}, "sequence_idx is .*float32"),
        ({"x_TH": torch.zeros(2, 4, device="meta")}, "x is on meta"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_a_sentence(kwargs: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logit_router(4, topk=2)(**kwargs)
