"""The dispatcher that Megatron drives: which rows move, how they are padded, and whose buffer moves them."""

from __future__ import annotations

import pytest

from tests.helpers import megatron_jobs as jobs
from tests.helpers.ranks import Pools

RTOL = 1e-5


def test_a_zero_probability_stays_with_the_expert_that_was_chosen(megatron_ranks: Pools) -> None:
    per_rank = megatron_ranks.run(jobs.zero_probability, 4, "moe_ep")
    num_tokens = 4 * 4 * jobs.SEQUENCES
    counts = [count for rank_counts, _ in per_rank for count in rank_counts]
    assert counts == [0, num_tokens, 0, 0, 0, 0, num_tokens, 0]
    assert max(worst for _, worst in per_rank) < RTOL  # and it has its gradient


def test_a_rank_without_tokens_and_ranks_without_rows(megatron_ranks: Pools) -> None:
    per_rank = megatron_ranks.run(jobs.without_tokens, 4)
    assert [num_rows for _, num_rows in per_rank] == [18, 18, 0, 0]
    assert max(worst for worst, _ in per_rank) < RTOL


def test_ranks_with_different_numbers_of_tokens(megatron_ranks: Pools) -> None:
    for dispatcher in ("moe_ep", "deep_ep-api"):
        per_rank = megatron_ranks.run(jobs.compare, 4, (1, 4, 1), dispatcher, {}, None, None, (5, 2, 12, 1))
        worst = max(departure for found in per_rank for name, departure in found if "token" not in name)
        assert worst < RTOL, per_rank


@pytest.mark.parametrize(
    ("alignment", "fp8", "multiple"), [(1, False, 1), (16, False, 16), (1, True, 16), (6, True, 48)]
)
def test_rows_of_an_expert_are_padded_once_with_zeros(
    megatron_ranks: Pools, alignment: int, fp8: bool, multiple: int
) -> None:
    per_rank = megatron_ranks.run(jobs.padded_counts, 4, alignment, fp8)
    for counts, num_rows, in_padding in per_rank:
        assert sum(counts) == num_rows
        assert all(count % multiple == 0 for count in counts), counts
        assert in_padding == 0


def test_two_forwards_may_be_in_flight(megatron_ranks: Pools) -> None:
    assert max(megatron_ranks.run(jobs.two_in_flight, 4)) == 0


def test_the_layers_of_one_configuration_share_a_buffer_with_its_sm_budget(megatron_ranks: Pools) -> None:
    for shares, shares_with_another, num_sms, _ in megatron_ranks.run(jobs.shared_buffers, 4):
        assert (shares, shares_with_another, num_sms) == (True, False, 24)


def test_the_spec_builds_megatrons_layers_with_ours_where_experts_are(megatron_ranks: Pools) -> None:
    ours, dense = "moe_ep.integrations.megatron.MoELayer", "megatron.core.transformer.mlp.MLP"
    for found in megatron_ranks.run(jobs.layers_of_the_spec, 4, 3, [0, 1, 1]):
        assert found == [dense, ours, ours]
