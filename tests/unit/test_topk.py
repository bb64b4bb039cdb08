"""Exact selection: ties, order, masks, special values, many experts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.layers.topk import group_mask, group_scores, ordered_int32, topk_lowest_index


def plain_topk(row: list[float], k: int, allowed: list[bool]) -> list[int]:
    """Oracle: NaN as the largest value, then the value, then the lowest index; at the end what is masked, by index."""

    def order(index: int) -> tuple[bool, bool, float, int]:
        value = row[index]
        if not allowed[index]:
            return (True, False, 0.0, index)
        return (False, not math.isnan(value), 0.0 if math.isnan(value) else -value, index)

    return sorted(range(len(row)), key=order)[:k]


float32s = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, -math.nan, 2.0**-149, -(2.0**-149)]),
    st.floats(width=32),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(float32s, st.booleans()), min_size=1, max_size=24), st.data())
def test_agrees_with_a_plain_sort_on_any_floats_and_masks(
    entries: list[tuple[float, bool]], data: st.DataObject
) -> None:
    # cases N04, G08
    row = [value for value, _ in entries]
    allowed = [flag for _, flag in entries]
    k = data.draw(st.integers(0, len(row)))
    chosen = topk_lowest_index(torch.tensor([row], dtype=torch.float32), k, torch.tensor([allowed]))
    assert chosen.dtype == torch.int64
    assert chosen[0].tolist() == plain_topk(row, k, allowed)


def test_keys_keep_the_order_of_neighbouring_floats() -> None:
    values = torch.tensor([-math.inf, -1.0, -1e-45, 0.0, 1e-45, 0.50001, 0.50002, 1.0, math.inf, math.nan])
    keys = ordered_int32(values)
    assert keys.dtype == torch.int32
    assert (keys[1:] > keys[:-1]).all()
    assert keys[0] > -(2**31)
    assert ordered_int32(torch.tensor([-0.0])).item() == ordered_int32(torch.tensor([0.0])).item() == 0


def test_equal_scores_take_the_lowest_index_in_every_run_and_row() -> None:
    """Case G08 (a): 20 runs and a batch of 4096 rows."""
    for _ in range(20):
        assert topk_lowest_index(torch.zeros(1, 8), 3).tolist() == [[0, 1, 2]]
    assert torch.equal(topk_lowest_index(torch.zeros(4096, 8), 3), torch.tensor([0, 1, 2]).expand(4096, 3))


def test_close_scores_are_not_treated_as_ties() -> None:
    """Case G10: id 200 is better by 1e-5 of score and must win over id 3."""
    logits = torch.full((1, 256), -5.0)
    logits[0, 3], logits[0, 200] = 0.0, 4e-5
    assert topk_lowest_index(torch.sigmoid(logits), 1).item() == 200


def test_masked_entries_lose_against_minus_infinity() -> None:
    scores = torch.tensor([[5.0, -math.inf, -math.inf, 7.0]])
    mask = torch.tensor([[False, True, True, False]])
    assert topk_lowest_index(scores, 2, mask).tolist() == [[1, 2]]


def test_selects_among_more_than_256_entries_in_order() -> None:
    """Case N08."""
    wanted = [338, 511, 256, 300, 400, 450, 257, 0, 255, 500]
    scores = torch.full((1, 512), -4.0)
    for position, index in enumerate(wanted):
        scores[0, index] = 3.0 - 0.25 * position
    assert topk_lowest_index(scores, 10).tolist() == [wanted]
    assert topk_lowest_index(torch.zeros(1, 1), 1).tolist() == [[0]]
    last = torch.zeros(1, 257)
    last[0, 256] = 1.0
    assert topk_lowest_index(last, 2).tolist() == [[256, 0]]


def test_takes_up_to_64_of_many() -> None:
    scores = torch.arange(2048, dtype=torch.float32).flip(0)[None]
    assert topk_lowest_index(scores, 64).tolist() == [list(range(64))]


def test_no_rows_give_no_ids() -> None:
    assert topk_lowest_index(torch.zeros(0, 8), 3).shape == (0, 3)


@pytest.mark.parametrize("k", [-1, 5])
def test_impossible_k_is_refused_with_both_numbers(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k is {k}, but a row has 4 entries"):
        topk_lowest_index(torch.zeros(1, 4), k)


def test_group_scores_follow_their_definitions() -> None:
    scores = torch.tensor([[0.9, 0.05, 0.5, 0.6, 0.55, 0.5, 0.4, 0.3]])
    assert torch.allclose(group_scores(scores, 2, "max", 3), torch.tensor([[0.9, 0.55]]))
    assert torch.allclose(group_scores(scores, 2, "top2", 3), torch.tensor([[1.5, 1.05]]))
    assert torch.allclose(group_scores(scores, 2, "megatron", 3), torch.tensor([[2.0, 1.45]]))
    assert torch.equal(group_scores(scores, 8, "top2", 1), scores)


def test_group_mask_covers_whole_groups_and_breaks_ties_low() -> None:
    mask = group_mask(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), 2, 8)
    assert mask.tolist() == [[True, True, True, True, False, False, False, False]]
