"""`Config` of DeepEP V1: checks, byte hints and recommended values, beside figures computed apart from the code."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch

from moe_ep.deep_ep_v1.config import (
    Config,
    low_latency_rdma_size_hint,
    recommended_combine_config,
    recommended_dispatch_config,
    topk_idx_t,
)

ROW_BYTES = 7168 * 2  # H = 7168 in bfloat16
LISTED = [2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160]


def chunks(config: Config) -> tuple[int, ...]:
    return dataclasses.astuple(config)[1:]


def test_the_arguments_are_those_of_deepep_in_its_order() -> None:
    parameters = inspect.signature(Config).parameters.values()
    assert [(parameter.name, parameter.default) for parameter in parameters] == [
        ("num_sms", 20),
        ("num_max_nvl_chunked_send_tokens", 6),
        ("num_max_nvl_chunked_recv_tokens", 256),
        ("num_max_rdma_chunked_send_tokens", 6),
        ("num_max_rdma_chunked_recv_tokens", 256),
    ]


def test_the_receive_tokens_of_rdma_become_a_multiple_of_the_send_tokens() -> None:
    assert chunks(Config()) == (6, 256, 6, 258)
    assert chunks(Config(20, 6, 256, 8, 128)) == (6, 256, 8, 128)
    assert chunks(Config(20, 6, 256, 20, 21)) == (6, 256, 20, 40)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((-1,), ["num_sms is -1", "at least 0"]),
        ((20, 0), ["num_max_nvl_chunked_send_tokens is 0", "at least 1"]),
        ((20, 6, -5), ["num_max_nvl_chunked_recv_tokens is -5", "at least 1"]),
        ((20, 6, 256, 0), ["num_max_rdma_chunked_send_tokens is 0", "at least 1"]),
        ((20, 6, 256, 6, 0), ["num_max_rdma_chunked_recv_tokens is 0", "at least 1"]),
        ((20, 256, 256), ["num_max_nvl_chunked_send_tokens is 256", "which is 256", "raise"]),
        ((20, 6, 256, 8, 8), ["num_max_rdma_chunked_send_tokens is 8", "which is 8", "at least 9"]),
        ((20, 6, 256, 8, 3), ["num_max_rdma_chunked_send_tokens is 8", "which is 3, rounded up to 8", "at least 9"]),
    ],
)
def test_values_out_of_their_limits_are_refused_with_a_sentence(given: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\.$") as caught:
        Config(*given)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_nearest_values_to_each_limit_are_taken() -> None:
    assert chunks(Config(0, 1, 2, 1, 2)) == (1, 2, 1, 2)
    # The receive tokens that the refusal of (8, 8) asks for.
    assert chunks(Config(20, 6, 256, 8, 9)) == (6, 256, 8, 16)


def test_a_value_that_is_no_whole_number_is_refused_with_a_sentence() -> None:
    with pytest.raises(TypeError, match="num_sms is 24.0; give a whole number"):
        Config(24.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_ranks is '8'; give a whole number"):
        recommended_dispatch_config("8", 20)  # type: ignore[arg-type]


def test_a_config_is_frozen_compares_by_value_and_survives_copy_and_pickle() -> None:
    config = Config(24, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_sms = 20  # type: ignore[misc]
    assert config == Config(24, 8) != Config(20, 8)
    assert len({config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))}) == 1


@pytest.mark.parametrize(
    ("num_ranks", "megabytes"), [(2, 84), (4, 168), (8, 336), *[(size, 378) for size in LISTED[3:8]], (160, 944)]
)
def test_the_nvlink_hint_gives_the_known_sizes_at_20_sms_and_7168_bfloat16(num_ranks: int, megabytes: int) -> None:
    num_bytes = recommended_dispatch_config(num_ranks, 20).get_nvl_buffer_size_hint(ROW_BYTES, num_ranks)
    assert round(num_bytes / 1e6) == megabytes


@pytest.mark.parametrize(("num_ranks", "megabytes"), [(16, 92), (32, 168), (64, 336), (160, 866)])
def test_the_rdma_hint_gives_the_known_sizes_at_20_sms_and_7168_bfloat16(num_ranks: int, megabytes: int) -> None:
    num_bytes = recommended_dispatch_config(num_ranks, 20).get_rdma_buffer_size_hint(ROW_BYTES, num_ranks)
    assert round(num_bytes / 1e6) == megabytes


def test_the_hints_are_right_to_the_byte_and_rounded_up_to_128() -> None:
    config = Config(4, 1, 3, 2, 5)  # 2 channels; RDMA receives 6
    # One node: 2 channels * 3 peers * (20 + 3 * (10 + 2056)).
    assert config.get_nvl_buffer_size_hint(10, 3) == 37376 >= 2 * 3 * (20 + 3 * 2066) == 37308
    # Two nodes: 2 channels * 8 peers * (28 + 3 * 2066), and 2 channels * 2 nodes * (144 + 12 * 2082).
    assert config.get_nvl_buffer_size_hint(10, 16) == 99712 >= 2 * 8 * (28 + 3 * 2066) == 99616
    assert config.get_rdma_buffer_size_hint(10, 16) == 100608 >= 2 * 2 * (144 + 12 * 2082) == 100512
    assert all(number % 128 == 0 for number in (37376, 99712, 100608))


def test_only_groups_of_more_than_one_node_need_rdma_bytes() -> None:
    hints = {size: Config().get_rdma_buffer_size_hint(ROW_BYTES, size) for size in (1, 2, 7, 8, 9, 16)}
    assert [size for size, num_bytes in hints.items() if num_bytes] == [9, 16]


def test_a_node_that_is_not_full_counts_as_a_node() -> None:
    assert Config().get_rdma_buffer_size_hint(ROW_BYTES, 12) == Config().get_rdma_buffer_size_hint(ROW_BYTES, 16)
    assert Config().get_nvl_buffer_size_hint(ROW_BYTES, 12) == Config().get_nvl_buffer_size_hint(ROW_BYTES, 16)


@pytest.mark.parametrize("given", [(0, 8), (-2, 8), (16, 0), (16, -1)])
def test_the_hints_refuse_sizes_below_1(given: tuple[int, int]) -> None:
    for hint in (Config().get_nvl_buffer_size_hint, Config().get_rdma_buffer_size_hint):
        with pytest.raises(ValueError, match=r"(hidden_bytes|num_ranks) is -?\d; it must be at least 1\.$"):
            hint(*given)


@pytest.mark.parametrize(
    ("num_ranks", "dispatch", "combine"),
    [
        (2, (24, 256, 6, 132), (10, 256, 6, 132)),
        (4, (6, 256, 6, 132), (9, 256, 6, 132)),
        (8, (6, 256, 6, 132), (4, 256, 6, 132)),
        (16, (36, 288, 20, 140), (4, 288, 12, 132)),
        (24, (32, 288, 8, 128), (1, 288, 8, 128)),
        (32, (32, 288, 8, 128), (1, 288, 8, 128)),
        (48, (32, 288, 8, 128), (1, 288, 8, 128)),
        (64, (32, 288, 8, 128), (1, 288, 8, 128)),
        (96, (20, 480, 12, 132), (1, 480, 8, 128)),
        (128, (20, 560, 12, 132), (1, 560, 8, 128)),
        (144, (32, 720, 12, 132), (2, 720, 8, 128)),
        (160, (28, 720, 12, 132), (2, 720, 8, 128)),
    ],
)
def test_a_listed_size_gets_deepeps_entry(num_ranks: int, dispatch: tuple[int, ...], combine: tuple[int, ...]) -> None:
    # The last number is the table's 128, rounded up to a multiple of the one before.
    assert recommended_dispatch_config(num_ranks, 22) == Config(22, *dispatch)
    assert recommended_combine_config(num_ranks, 22) == Config(22, *combine)


def test_any_other_size_gets_the_entry_of_the_next_listed_one() -> None:
    for recommended in (recommended_dispatch_config, recommended_combine_config):
        for size in range(1, 161):
            listed = min(known for known in LISTED if known >= size)
            assert recommended(size, 20) == recommended(listed, 20)
        assert recommended(2048, 20) == recommended(160, 20)


@pytest.mark.parametrize("num_ranks", [0, -8])
def test_a_group_of_no_ranks_has_no_recommended_config(num_ranks: int) -> None:
    for recommended in (recommended_dispatch_config, recommended_combine_config):
        with pytest.raises(ValueError, match=f"num_ranks is {num_ranks}; it must be at least 1"):
            recommended(num_ranks, 20)


@pytest.mark.parametrize(("num_experts", "gigabytes"), [(288, 2.15), (256, 1.91)])
def test_the_low_latency_hint_gives_the_known_sizes(num_experts: int, gigabytes: float) -> None:
    num_bytes = low_latency_rdma_size_hint(128, 7168, 8, num_experts)
    assert round(num_bytes / 1e9, 2) == gigabytes


def test_the_low_latency_hint_is_right_to_the_byte() -> None:
    # H = 256: a dispatch message 16 + 512, a combine message 512 + 8; send and receive space are E messages a token.
    assert low_latency_rdma_size_hint(4, 256, 2, 6) == 2 * (6 * 4 * 520 + 6 * 4 * 528) + 2 * 128 == 50560
    # One expert: the 4 * 528 bytes of dispatch are more than the 4 * 520 of combine.
    assert low_latency_rdma_size_hint(4, 256, 2, 1) == 2 * (4 * 528 + 4 * 528) + 2 * 128 == 8704
    # H = 130 has two scales; 2 * 276 + 2 * 276 + 256 = 1360 rounded up.
    assert low_latency_rdma_size_hint(1, 130, 1, 1) == 1408


@pytest.mark.parametrize("given", [(0, 256, 2, 6), (4, 0, 2, 6), (4, 256, 0, 6), (4, 256, 2, -1)])
def test_the_low_latency_hint_refuses_sizes_below_1(given: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"\w+ is -?\d; it must be at least 1\.$"):
        low_latency_rdma_size_hint(*given)


def test_expert_ids_are_int64() -> None:
    assert topk_idx_t is torch.int64
