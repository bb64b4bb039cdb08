"""`Buffer` against the facts about DeepEP V1: names, order and defaults of arguments."""

from __future__ import annotations

import inspect

import pytest
import torch

import moe_ep as deep_ep

NEEDED = inspect.Parameter.empty
STREAM = {"previous_event": None, "async_finish": False, "allocate_on_comm_stream": False}

SIGNATURES: dict[str, dict[str, object]] = {
    "__init__": {
        "group": None,
        "num_nvl_bytes": 0,
        "num_rdma_bytes": 0,
        "low_latency_mode": False,
        "num_qps_per_rank": 24,
        "allow_nvlink_for_low_latency_mode": True,
        "allow_mnnvl": False,
        "explicitly_destroy": False,
        "enable_shrink": False,
        "comm": None,
    },
    "get_dispatch_layout": {"topk_idx": NEEDED, "num_experts": NEEDED, **STREAM},
    "dispatch": {
        "x": NEEDED,
        "handle": None,
        "num_tokens_per_rank": None,
        "num_tokens_per_rdma_rank": None,
        "is_token_in_rank": None,
        "num_tokens_per_expert": None,
        "topk_idx": None,
        "topk_weights": None,
        "expert_alignment": 1,
        "num_worst_tokens": 0,
        "config": None,
        **STREAM,
    },
    "combine": {"x": NEEDED, "handle": NEEDED, "topk_weights": None, "bias": None, "config": None, **STREAM},
    "get_local_buffer_tensor": {"dtype": NEEDED, "size": None, "offset": 0, "use_rdma_buffer": False},
    "low_latency_dispatch": {
        "x": NEEDED,
        "topk_idx": NEEDED,
        "num_max_dispatch_tokens_per_rank": NEEDED,
        "num_experts": NEEDED,
        "cumulative_local_expert_recv_stats": None,
        "dispatch_wait_recv_cost_stats": None,
        "use_fp8": True,
        "round_scale": False,
        "use_ue8m0": False,
        "async_finish": False,
        "return_recv_hook": False,
    },
    "low_latency_combine": {
        "x": NEEDED,
        "topk_idx": NEEDED,
        "topk_weights": NEEDED,
        "handle": NEEDED,
        "use_logfmt": False,
        "zero_copy": False,
        "async_finish": False,
        "return_recv_hook": False,
        "out": None,
        "combine_wait_recv_cost_stats": None,
    },
    "clean_low_latency_buffer": {"num_max_dispatch_tokens_per_rank": NEEDED, "hidden": NEEDED, "num_experts": NEEDED},
    "get_next_low_latency_combine_buffer": {"handle": NEEDED},
    "low_latency_update_mask_buffer": {"rank_to_mask": NEEDED, "mask": False},
    "low_latency_query_mask_buffer": {"mask_status": NEEDED},
    "low_latency_clean_mask_buffer": {},
    "get_comm_stream": {},
    "destroy": {},
}
STATIC: dict[str, list[str]] = {
    "is_sm90_compiled": [],
    "set_num_sms": ["num_sms"],
    "capture": [],
    "get_dispatch_config": ["num_ranks"],
    "get_combine_config": ["num_ranks"],
    "get_low_latency_rdma_size_hint": ["num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_method_takes_deep_eps_arguments_in_its_order_with_its_defaults(name: str) -> None:
    parameters = [p for p in inspect.signature(getattr(deep_ep.Buffer, name)).parameters.values() if p.name != "self"]
    ours = {p.name: p.default for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY}
    assert list(ours.items()) == list(SIGNATURES[name].items())


@pytest.mark.parametrize("name", STATIC)
def test_a_static_method_is_called_on_the_class(name: str) -> None:
    assert list(inspect.signature(getattr(deep_ep.Buffer, name)).parameters) == STATIC[name]


def test_the_module_has_deep_eps_names() -> None:
    assert deep_ep.topk_idx_t == torch.int64
    assert deep_ep.utils.EventOverlap is deep_ep.EventOverlap
    assert deep_ep.utils.EventHandle is deep_ep.EventHandle
    config = deep_ep.Buffer.get_dispatch_config(2)
    assert isinstance(config, deep_ep.Config)
    assert config.get_nvl_buffer_size_hint(7168 * 2, 2) > config.get_rdma_buffer_size_hint(7168 * 2, 2) == 0


def test_set_num_sms_reaches_buffers_without_their_own() -> None:
    own, follows = deep_ep.Buffer(num_sms=6), deep_ep.Buffer()
    before = follows.num_sms
    try:
        deep_ep.Buffer.set_num_sms(8)
        assert (own.num_sms, follows.num_sms) == (6, 8)
        with pytest.raises(ValueError, match="num_sms is 0; it must be at least 1"):
            deep_ep.Buffer.set_num_sms(0)
    finally:
        deep_ep.Buffer.set_num_sms(before)


def test_scratch_memory_has_the_size_that_was_asked_for() -> None:
    buffer = deep_ep.Buffer(None, 256, 128)
    assert buffer.get_local_buffer_tensor(torch.float32).shape == (64,)
    assert buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size((4, 8)), 64).shape == (4, 8)
    assert buffer.get_local_buffer_tensor(torch.int64, use_rdma_buffer=True).shape == (16,)
    buffer.get_local_buffer_tensor(torch.uint8).fill_(3)
    assert int(buffer.get_local_buffer_tensor(torch.uint8, torch.Size((1,)), 255)) == 3
    with pytest.raises(ValueError, match="a view of 400 bytes .* does not fit the 256 bytes"):
        buffer.get_local_buffer_tensor(torch.float32, torch.Size((100,)))
