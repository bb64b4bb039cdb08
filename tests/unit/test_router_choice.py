"""Which experts the router chooses: groups, bias, ties, special values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_ep.layers import router as router_module
from moe_ep.layers.router import TopKRouter
from tests.unit.router_helpers import assert_close, logit_router, make_config, set_bias, sigmoid_logits


def test_experts_outside_the_chosen_groups_never_win_with_negative_scores() -> None:
    """Case G01."""
    router = logit_router(
        8, topk=3, score_function="sigmoid", normalize=True, num_groups=4, group_topk=2, expert_bias=True
    )
    set_bias(router, [-1.0] * 8)
    ids, weights = router(sigmoid_logits([0.9, 0.8, 0.2, 0.1, 0.6, 0.5, 0.4, 0.3]))
    assert ids.tolist() == [[0, 1, 4]]
    assert_close(weights, [[0.391304, 0.347826, 0.260870]])


@pytest.mark.parametrize(
    ("group_score", "expected_ids", "expected_weights"),
    [
        ("top2", [[2, 3]], [[0.521739, 0.478261]]),
        ("max", [[0, 1]], [[0.947368, 0.052632]]),
        ("megatron", [[2, 3]], [[0.521739, 0.478261]]),
    ],
)
def test_group_score_is_a_named_setting(
    group_score: str, expected_ids: list[list[int]], expected_weights: list[list[float]]
) -> None:
    """Case G03."""
    router = logit_router(
        8, topk=2, score_function="sigmoid", normalize=True, num_groups=4, group_topk=1, group_score=group_score
    )
    ids, weights = router(sigmoid_logits([0.9, 0.05, 0.6, 0.55, 0.5, 0.45, 0.3, 0.2]))
    assert ids.tolist() == expected_ids
    assert_close(weights, expected_weights)


def test_megatron_group_score_sums_topk_over_group_topk() -> None:
    """With K // group_topk = 3 the best three of a group decide: group 1, where top2 takes group 0."""
    scores = sigmoid_logits([0.9, 0.8, 0.1, 0.1, 0.7, 0.7, 0.7, 0.1])
    options = {"topk": 3, "score_function": "sigmoid", "num_groups": 2, "group_topk": 1}
    assert logit_router(8, group_score="megatron", **options)(scores)[0].tolist() == [[4, 5, 6]]
    assert logit_router(8, group_score="top2", **options)(scores)[0].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("training", [True, False])
def test_one_expert_per_group_works(training: bool) -> None:
    """Case G04."""
    router = logit_router(8, topk=2, score_function="sigmoid", normalize=True, num_groups=8, group_topk=4)
    router.train(training)
    ids, weights = router(sigmoid_logits([0.1, 0.9, 0.3, 0.7, 0.2, 0.6, 0.5, 0.4]))
    assert ids.tolist() == [[1, 3]]
    assert_close(weights, [[0.5625, 0.4375]])


@pytest.mark.parametrize(
    ("num_experts", "options", "numbers"),
    [
        (10, {"topk": 2, "num_groups": 4, "group_topk": 2}, ("10", "4")),
        (8, {"topk": 3, "num_groups": 4, "group_topk": 1}, ("3", "2")),
        (8, {"topk": 9}, ("9", "8")),
        (8, {"topk": 2, "num_groups": 4, "group_topk": 5}, ("5", "4")),
        (8, {"topk": 0}, ("0", "1")),
        (8, {"topk": 2, "num_groups": 4}, ("num_groups", "group_topk")),
    ],
    ids=["a", "b", "c", "d", "e", "f"],
)
def test_impossible_settings_are_refused_before_a_router_exists(
    num_experts: int, options: dict[str, int], numbers: tuple[str, str]
) -> None:
    """Case G05."""
    with pytest.raises(ValueError, match=numbers[0]) as error:
        TopKRouter(make_config(num_experts, **options))
    assert numbers[1] in str(error.value)


def test_softmax_runs_over_all_experts_before_the_group_mask() -> None:
    """Case G07 (0.731059 would be the mask first)."""
    router = logit_router(4, topk=1, num_groups=2, group_topk=1)
    ids, weights = router(torch.tensor([[2.0, 1.0, 0.0, -1.0]]))
    assert ids.tolist() == [[0]]
    assert_close(weights, [[0.643914]])


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("pre_softmax", [True, False])
def test_equal_logits_take_the_lowest_ids_with_equal_weights(score_function: str, pre_softmax: bool) -> None:
    """Case G08."""
    options = {"score_function": score_function, "pre_softmax": pre_softmax}
    plain = logit_router(8, topk=3, **options)
    grouped = logit_router(8, topk=4, num_groups=4, group_topk=2, **options)
    for num_tokens in [1] * 20 + [4096]:
        ids, weights = plain(torch.zeros(num_tokens, 8))
        assert torch.equal(ids, torch.tensor([0, 1, 2]).expand(num_tokens, 3))
        assert torch.equal(weights, weights[:1, :1].expand(num_tokens, 3))
        assert torch.equal(grouped(torch.zeros(num_tokens, 8))[0], torch.tensor([0, 1, 2, 3]).expand(num_tokens, 4))


def test_a_slightly_better_expert_wins_whatever_its_index() -> None:
    """Case G10."""
    logits = torch.full((1, 256), -5.0)
    logits[0, 3], logits[0, 200] = 0.0, 4e-5
    assert logit_router(256, topk=1, score_function="sigmoid")(logits)[0].item() == 200


def test_all_512_experts_are_looked_at() -> None:
    """Case N08."""
    wanted = [338, 511, 256, 300, 400, 450, 257, 0, 255, 500]
    logits = torch.full((1, 512), -4.0)
    logits[0, wanted] = 3.0 - 0.25 * torch.arange(10)
    for options in ({"score_function": "sigmoid"}, {}, {"pre_softmax": False}):
        assert logit_router(512, topk=10, **options)(logits)[0].tolist() == [wanted]
    last = torch.full((1, 257), -4.0)
    last[0, 256] = 1.0
    assert logit_router(257, topk=2)(last)[0].tolist() == [[256, 0]]
    ids, weights = logit_router(1, topk=1)(torch.tensor([[0.3]]))
    assert ids.tolist() == [[0]]
    assert weights.tolist() == [[1.0]]


@pytest.mark.parametrize("options", [{"score_function": "sigmoid", "normalize": True}, {}, {"pre_softmax": False}])
@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "group_topk": 2}])
def test_special_logits_give_valid_distinct_ids(
    options: dict[str, object], groups: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case N04: NaN counts as the largest value; a row of NaN keeps NaN weights."""

    def logits_are_the_input(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
        return x_TH

    monkeypatch.setattr(router_module, "router_logits", logits_are_the_input)
    router = logit_router(8, topk=2, **options, **groups)
    normal = torch.tensor([0.1, -0.4, 0.9, 0.3, -1.0, 0.7, 0.2, 0.0])
    rows = normal.repeat(7, 1)
    rows[1] = math.nan
    rows[2, 5] = math.nan
    rows[3, 6] = math.inf
    rows[4, 2] = -math.inf
    rows[5] = -math.inf
    rows[6] = math.inf
    ids, weights = router(rows)
    alone_ids, alone_weights = router(rows[:1])
    assert torch.equal(ids[:1], alone_ids)
    assert torch.equal(weights[:1], alone_weights)
    for row in ids.tolist():
        assert len(set(row)) == 2
        assert all(0 <= expert < 8 for expert in row)
    assert ids[1].tolist() == [0, 1]
    assert weights[1].isnan().all()
    assert weights[:1].isfinite().all()
    if options.get("score_function") == "sigmoid":  # softmax turns the whole row into NaN, sigmoid keeps the one
        assert ids[2, 0] == 5
        assert ids[3, 0] == 6
    if not groups:
        assert 2 not in ids[4].tolist()


def test_bias_steers_softmax_choices_too() -> None:
    for pre_softmax in (True, False):
        router = logit_router(4, topk=2, expert_bias=True, pre_softmax=pre_softmax)
        logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
        _, plain = router(logits)
        set_bias(router, [0.0, 0.0, 0.0, 10.0])
        ids, weights = router(logits)
        assert ids.tolist() == [[3, 0]]
        assert weights[0, 0] < weights[0, 1]
        assert plain.sum() >= weights.sum()
