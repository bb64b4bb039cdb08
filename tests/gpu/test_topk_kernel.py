"""The router's kernels beside the plain formula: ids and counts number for number, weights, gradients, custom ops."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_ep import _native
from moe_ep.layers import balance, routing_kernel
from moe_ep.layers.router import TopKRouter
from moe_ep.layers.routing_kernel import Routing
from tests.helpers.compare import assert_same_bits
from tests.unit.router_helpers import logit_router, make_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and PyTorch finds none"),
    pytest.mark.skipif(_native.load() is None, reason="needs moe_ep._C, which this install was made without"),
    pytest.mark.filterwarnings("ignore:router.topk = 1 together"),
]

SCORES = {
    "softmax": {"score_function": "softmax"},
    "softmax of the chosen": {"score_function": "softmax", "pre_softmax": False},
    "sigmoid": {"score_function": "sigmoid", "expert_bias": True},
    "normalised": {"score_function": "sigmoid", "normalize": True, "scaling_factor": 2.5},
    "normalised softmax": {"score_function": "softmax", "normalize": True, "expert_bias": True},
    "all of it": {"score_function": "softmax", "pre_softmax": False, "normalize": True, "scaling_factor": 0.5},
}
EVERY_SCORE = pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES.keys())
SIZES = [(1, 1), (2, 1), (5, 5), (8, 2), (31, 4), (32, 32), (33, 8), (60, 6), (64, 8), (100, 33), (128, 8), (160, 6)]
SIZES += [(256, 8), (257, 64), (384, 7), (512, 10), (1000, 64), (1024, 8)]
GROUPS = [(8, 4, 2, 2), (8, 8, 4, 2), (60, 5, 2, 6), (64, 1, 1, 8), (96, 48, 40, 8), (160, 8, 3, 6), (256, 8, 4, 8)]
GROUPS += [(512, 64, 16, 33), (1024, 512, 20, 8)]


def drawn_logits(num_tokens: int, num_experts: int, step: float | None = None) -> Tensor:
    """[T, E] on the GPU; multiples of `step` where it is given, so that many are equal."""
    generator = torch.Generator().manual_seed(num_tokens * 10_000 + num_experts)
    logits = torch.randn(num_tokens, num_experts, generator=generator) * 2
    return (logits if step is None else (logits / step).round() * step).cuda()


def router_for(num_experts: int, options: dict[str, Any], bias_step: float | None = None) -> TopKRouter:
    """A router on the GPU, with a bias where the options ask for one."""
    router = logit_router(num_experts, **options).cuda()
    if router.expert_bias is not None:
        bias = torch.randn(num_experts, generator=torch.Generator().manual_seed(num_experts)) * 0.1
        router.expert_bias.copy_(bias if bias_step is None else (bias / bias_step).round() * bias_step)
    return router


def by_kernel(router: TopKRouter, logits: Tensor, mask: Tensor | None = None, needs_probs: bool = True) -> Routing:
    assert routing_kernel.serves(logits, router.options)
    return router._route(logits, mask, needs_probs)


def by_formula(router: TopKRouter, logits: Tensor, mask: Tensor | None = None, needs_probs: bool = True) -> Routing:
    with mock.patch.object(routing_kernel, "serves", return_value=False):
        return router._route(logits, mask, needs_probs)


def assert_same_choice(router: TopKRouter, logits: Tensor, mask: Tensor | None = None) -> Routing:
    actual, expected = by_kernel(router, logits, mask), by_formula(router, logits, mask)
    assert actual.topk_idx.dtype == torch.int64
    ids = expected.topk_idx
    if router.options.score_function == "softmax" and router.options.pre_softmax:
        ids = router._choose(actual.probs).masked_fill(ids < 0, -1)  # from the very scores that the kernel chose by
        expected = expected._replace(counts=balance.expert_counts(ids, router.num_experts))
        expected = expected._replace(topk_weights=router._weights(actual.probs, ids.clamp(min=0)) * (ids >= 0))
    assert torch.equal(actual.topk_idx, ids)
    assert torch.equal(actual.counts, expected.counts)
    close = {"rtol": 1e-6, "atol": 1e-7, "equal_nan": True}
    torch.testing.assert_close(actual.topk_weights, expected.topk_weights, **close)
    torch.testing.assert_close(actual.probs, expected.probs, **close)
    return actual


@EVERY_SCORE
@pytest.mark.parametrize(("num_experts", "topk"), SIZES)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 515])
def test_the_kernel_chooses_what_the_formula_chooses(
    num_tokens: int, num_experts: int, topk: int, scores: dict[str, Any]
) -> None:
    # cases N08, G02, G06
    router = router_for(num_experts, {"topk": topk, **scores})
    assert_same_choice(router, drawn_logits(num_tokens, num_experts))


@EVERY_SCORE
@pytest.mark.parametrize(("num_experts", "num_groups", "group_topk", "topk"), GROUPS)
@pytest.mark.parametrize("group_score", ["top2", "max", "megatron"])
def test_groups_are_chosen_as_in_the_formula(
    group_score: str, num_experts: int, num_groups: int, group_topk: int, topk: int, scores: dict[str, Any]
) -> None:
    # cases G01, G03, G04, G07
    if group_score == "megatron":
        topk = max(topk, group_topk)  # it sums K // group_topk scores, at least one
    groups = {"num_groups": num_groups, "group_topk": group_topk, "group_score": group_score}
    router = router_for(num_experts, {"topk": topk, **groups, **scores})
    assert_same_choice(router, drawn_logits(130, num_experts))


@EVERY_SCORE
@pytest.mark.parametrize("groups", [{}, {"num_groups": 8, "group_topk": 4}], ids=["no groups", "groups"])
def test_ties_go_to_the_lowest_index(groups: dict[str, Any], scores: dict[str, Any]) -> None:
    # case G08
    router = router_for(64, {"topk": 8, **groups, **scores}, bias_step=0.25)
    assert_same_choice(router, drawn_logits(1000, 64, step=1.0))
    if router.expert_bias is not None:
        router.expert_bias.zero_()
    equal = assert_same_choice(router, torch.zeros(20, 64, device="cuda"))
    assert equal.topk_idx.tolist() == [list(range(8))] * 20


@pytest.mark.parametrize(("num_experts", "topk"), SIZES)
def test_softmax_scores_have_the_bits_of_pytorch_on_the_same_gpu(num_experts: int, topk: int) -> None:
    router, logits = router_for(num_experts, {"topk": topk}), drawn_logits(500, num_experts)
    assert torch.equal(by_kernel(router, logits).probs, torch.softmax(logits, dim=-1))


def test_a_slightly_better_expert_wins_whatever_its_index() -> None:
    # case G10
    logits = torch.full((1, 256), -5.0, device="cuda")
    logits[0, 3], logits[0, 200] = 0.0, 4e-5
    assert by_kernel(router_for(256, {"topk": 1, "score_function": "sigmoid"}), logits).topk_idx.item() == 200


@EVERY_SCORE
@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "group_topk": 2}], ids=["no groups", "groups"])
def test_special_logits_choose_as_in_the_formula(groups: dict[str, Any], scores: dict[str, Any]) -> None:
    # cases N04, G11
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [
            [nan] * 8,
            [1.0, nan, 0.5, 3.0, 2.0, -1.0, 0.0, 1.0],
            [0.0, -nan, nan, 1.0, 2.0, 3.0, 4.0, 5.0],
            [inf, 0.0, inf, 1.0, -inf, 2.0, 3.0, 4.0],
            [-inf] * 8,
            [inf] * 8,
            [-inf, -inf, 1.0, -inf, -inf, -inf, -inf, 0.0],
            [-0.0, 0.0, -0.0, 0.0, -1.0, -1.0, 0.0, -0.0],
            [-200.0] * 8,
            [200.0, -200.0, 100.0, 90.0, 89.0, 88.0, 87.0, 1e-40],
        ],
        device="cuda",
    )
    chosen = assert_same_choice(router_for(8, {"topk": 3, **groups, **scores}), logits)
    assert all(len(set(row)) == 3 and min(row) >= 0 for row in chosen.topk_idx.tolist())


@EVERY_SCORE
@pytest.mark.parametrize("share", [0.3, 1.0], ids=["some", "all"])
def test_padding_gets_no_expert_no_weight_and_no_count(share: float, scores: dict[str, Any]) -> None:
    # case B05
    logits = drawn_logits(200, 40)
    mask = torch.rand(200, generator=torch.Generator().manual_seed(1)).cuda() < share
    chosen = assert_same_choice(router_for(40, {"topk": 4, **scores}), logits, mask)
    assert (chosen.topk_idx[mask] == -1).all()
    assert (chosen.topk_weights[mask] == 0).all()
    assert int(chosen.counts.sum()) == 4 * int((~mask).sum())


def test_two_runs_give_the_same_bits() -> None:
    router = router_for(256, {"topk": 8, "score_function": "sigmoid", "num_groups": 8, "group_topk": 4})
    logits = drawn_logits(3000, 256)
    first, second = by_kernel(router, logits), by_kernel(router, logits)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_all_tokens_to_one_expert_are_counted() -> None:
    # case I02 of the counts: every addition meets one counter
    logits = torch.zeros(40_000, 8, device="cuda")
    logits[:, 5] = 1.0
    assert by_kernel(router_for(8, {"topk": 1}), logits).counts.tolist() == [0, 0, 0, 0, 0, 40_000, 0, 0]


# -- gradients --------------------------------------------------------------------------------------------------------


def double_gradient(router: TopKRouter, logits: Tensor, chosen: Routing, loss: Any) -> Tensor:
    """The gradient of the logits by autograd through the plain formula in float64, for the experts that were chosen."""
    leaf = logits.double().requires_grad_()
    scores = router._scores(leaf)
    padding = chosen.topk_idx[:, :1] < 0
    weights = router._weights(scores, chosen.topk_idx.clamp(min=0)).masked_fill(padding, 0.0)
    probs = router._probs(leaf, scores).masked_fill(padding, 0.0)
    (gradient,) = torch.autograd.grad(loss(weights, probs), leaf)
    return gradient


LOSSES = {
    "weights": lambda weights, probs: (weights * slopes(weights)).sum(),
    "probabilities": lambda weights, probs: (probs * slopes(probs)).sum(),
    "both": lambda weights, probs: (weights * slopes(weights)).sum() + (probs.sum(0) * slopes(probs[0])).sum(),
    "one column": lambda weights, probs: weights[:, 0].sum() + probs[:, 0].sum(),
    "everything alike": lambda weights, probs: weights.sum() + probs.sum(),
}


def slopes(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(like.numel())
    return torch.randn(like.shape, generator=generator).to(like)


@EVERY_SCORE
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize(("num_experts", "topk"), [(1, 1), (8, 2), (33, 8), (100, 33), (128, 8), (384, 64), (1024, 6)])
@pytest.mark.parametrize("has_padding", [False, True])
def test_gradients_are_those_of_autograd_in_float64(
    has_padding: bool, num_experts: int, topk: int, loss: Any, scores: dict[str, Any]
) -> None:
    router = router_for(num_experts, {"topk": topk, **scores})
    logits = drawn_logits(70, num_experts).requires_grad_()
    mask = (torch.arange(70, device="cuda") % 3 == 0) if has_padding else None
    chosen = by_kernel(router, logits, mask)
    (actual,) = torch.autograd.grad(loss(chosen.topk_weights, chosen.probs), logits)
    expected = double_gradient(router, logits.detach(), chosen, loss)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    if mask is not None:
        assert (actual[mask] == 0).all()


def test_scores_that_underflow_have_finite_gradients() -> None:
    # case G11
    router = router_for(4, {"topk": 2, "score_function": "sigmoid", "normalize": True})
    logits = torch.full((3, 4), -200.0, device="cuda", requires_grad=True)
    chosen = by_kernel(router, logits)
    (chosen.topk_weights * slopes(chosen.topk_weights)).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_a_second_derivative_is_refused_with_a_sentence() -> None:
    # case A09
    router = router_for(8, {"topk": 2})
    logits = drawn_logits(3, 8).requires_grad_()
    weights = by_kernel(router, logits).topk_weights
    (gradient,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        gradient.sum().backward()


# -- the whole router -------------------------------------------------------------------------------------------------

ALL_LOSSES = {"aux_loss_coef": 0.1, "seq_aux_loss_coef": 0.1, "global_aux_loss_coef": 0.1, "z_loss_coef": 0.01}


def whole_router(scores: dict[str, Any], seed: int = 0) -> TopKRouter:
    torch.manual_seed(seed)
    router = TopKRouter(make_config(48, hidden_size=64, topk=6, **scores, **ALL_LOSSES)).cuda()
    torch.nn.init.normal_(router.weight, std=0.3)
    return router


def router_results(router: TopKRouter, call: Any) -> list[Tensor]:
    """Ids, weights and all gradients of one step with padding and two sequences."""
    x = torch.randn(90, 64, generator=torch.Generator().manual_seed(3)).cuda().requires_grad_()
    mask = torch.arange(90, device="cuda") % 10 == 9
    sequence_idx = (torch.arange(90, device="cuda") > 50).long()
    router.zero_grad()
    ids, weights = call(x, mask, sequence_idx)
    (weights * slopes(weights)).sum().backward()
    assert x.grad is not None
    assert router.weight.grad is not None
    return [ids, weights.detach(), x.grad, router.weight.grad.clone(), router.last_counts]


@EVERY_SCORE
def test_a_router_trains_alike_with_kernel_and_formula(scores: dict[str, Any]) -> None:
    router = whole_router(scores)
    actual = router_results(router, router)
    losses = dict(router.last_losses)
    with mock.patch.object(routing_kernel, "serves", return_value=False):
        expected = router_results(router, router)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[4], expected[4])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(actual[2:4], expected[2:4], strict=True):  # the router's GEMM rounds gradients to bfloat16
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max()))
    torch.testing.assert_close(losses, router.last_losses, rtol=1e-5, atol=1e-7)


@EVERY_SCORE
def test_a_compiled_router_gives_the_bits_of_the_eager_one(scores: dict[str, Any]) -> None:
    torch._dynamo.reset()
    router = whole_router(scores)
    expected = router_results(router, router)
    actual = router_results(router, torch.compile(router, backend="aot_eager", fullgraph=True))
    names = ("ids", "weights", "dx", "dweight", "counts")
    for name, ours, theirs in zip(names, actual, expected, strict=True):
        assert_same_bits(ours, theirs, name)


@pytest.mark.parametrize("needs_probs", [False, True])
def test_the_custom_ops_keep_the_rules_of_pytorch(needs_probs: bool) -> None:
    logits = drawn_logits(9, 16).requires_grad_()
    bias, mask = torch.randn(16, device="cuda"), torch.arange(9, device="cuda") > 6
    settings = ("sigmoid", 3, True, 1.5)
    # Its fourth check adds up the outputs, which integers first do not stand; the compiled router stands for it.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (logits, bias, mask, needs_probs, *settings, 4, 2, 2)
    torch.library.opcheck(routing_kernel.route_op, arguments, test_utils=checks)
    ids = routing_kernel.route_op(logits.detach(), bias, mask, needs_probs, *settings, 4, 2, 2)[0]
    grads = (torch.randn(9, 3, device="cuda"), torch.randn(9, 16, device="cuda") if needs_probs else None)
    torch.library.opcheck(routing_kernel.route_backward_op, (logits.detach(), ids, *grads, *settings))


def test_sizes_outside_the_kernel_take_the_formula() -> None:
    assert not routing_kernel.serves(torch.zeros(2, 1025, device="cuda"), router_for(8, {"topk": 2}).options)
    assert not routing_kernel.serves(torch.zeros(2, 8, device="cuda").double(), router_for(8, {"topk": 2}).options)
    router = router_for(1100, {"topk": 5})
    ids, _ = router(drawn_logits(4, 1100))
    assert ids.shape == (4, 5)


def test_logits_in_any_layout_are_read_right() -> None:
    # case I06
    router = router_for(24, {"topk": 4})
    wide = drawn_logits(24, 130)
    assert_same_choice(router, wide.t()[:, :24])
    assert_same_choice(router, drawn_logits(50, 48)[:, ::2])
