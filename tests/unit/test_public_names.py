"""Every public name exists, under the signature that callers rely on, and says in full what it does."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

import moe_ep
from moe_ep.config import EPConfig, MoEConfig, RouterConfig

FUNCTIONS = ("load_config", "dispatch", "dispatch_fp8", "combine", "save_checkpoint", "load_checkpoint")
CLASSES = (
    "MoELayer",
    "TopKRouter",
    "Buffer",
    "Config",
    "EventOverlap",
    "EventHandle",
    "EPTimeoutError",
    "ConfigError",
    "DispatchHandle",
    "DispatchOutput",
    "GroupedExperts",
    "SharedExperts",
)
METHODS = {
    "MoELayer": ("forward", "routing_stats", "update_expert_bias"),
    "TopKRouter": ("forward", "update_expert_bias"),
    "Buffer": (
        *("empty", "reset", "check", "close", "destroy", "all_reduce", "placement"),
        *("get_dispatch_layout", "dispatch", "combine", "capture", "get_comm_stream", "get_local_buffer_tensor"),
        *("low_latency_dispatch", "low_latency_combine", "clean_low_latency_buffer"),
        *("get_next_low_latency_combine_buffer", "low_latency_update_mask_buffer"),
        *("low_latency_query_mask_buffer", "low_latency_clean_mask_buffer"),
        *("set_num_sms", "get_dispatch_config", "get_combine_config", "get_low_latency_rdma_size_hint"),
        "is_sm90_compiled",
    ),
    "Config": ("get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint"),
    "EventOverlap": ("current_stream_wait",),
    "EventHandle": ("current_stream_wait",),
}
ON_THE_CLASS = ("set_num_sms", "get_dispatch_config", "get_combine_config", "get_low_latency_rdma_size_hint")
OUTPUTS = (
    *("x", "topk_idx", "topk_weights", "tokens_per_expert", "real_tokens_per_expert", "handle"),
    *("expert_counts", "expert_offsets"),
)


def _public(owner: Any) -> list[str]:
    """Methods and properties of a class that do not start with an underscore, those of its bases here included."""
    ours = [base for base in owner.__mro__ if base.__module__.split(".")[0] == "moe_ep"]
    found = {name: member for base in ours for name, member in vars(base).items() if not name.startswith("_")}
    return [name for name, member in found.items() if callable(getattr(owner, name)) or isinstance(member, property)]


def _summary_and_rest(documented: Any) -> tuple[str, str]:
    summary, _, rest = (inspect.getdoc(documented) or "").partition("\n")
    return summary.strip(), rest.strip()


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES, "topk_idx_t", "utils", "integrations", "parallel"])
def test_a_public_name_is_there_and_listed(name: str) -> None:
    assert hasattr(moe_ep, name)
    assert name in moe_ep.__all__


def test_every_listed_name_is_known_to_this_page() -> None:
    assert set(moe_ep.__all__) == {*FUNCTIONS, *CLASSES, "topk_idx_t", "utils", "integrations", "parallel"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_says_what_it_takes_gives_and_raises(name: str) -> None:
    summary, rest = _summary_and_rest(getattr(moe_ep, name))
    assert summary.endswith((".", "differentiable."))
    assert "Args:" in rest
    for parameter in inspect.signature(getattr(moe_ep, name)).parameters:
        assert parameter in rest, parameter


@pytest.mark.parametrize("name", CLASSES)
def test_a_public_class_has_more_than_a_summary(name: str) -> None:
    summary, rest = _summary_and_rest(getattr(moe_ep, name))
    assert summary
    assert rest


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in METHODS.items() for name in names])
def test_a_public_method_is_there_and_documented(owner: str, name: str) -> None:
    method = getattr(getattr(moe_ep, owner), name)
    assert callable(method)
    summary, rest = _summary_and_rest(method)
    assert summary
    takes = [p for p in inspect.signature(method).parameters if p != "self"]
    assert all(parameter in summary + rest for parameter in takes)


@pytest.mark.parametrize("owner", CLASSES)
def test_every_public_member_is_documented(owner: str) -> None:
    for name in _public(getattr(moe_ep, owner)):
        assert inspect.getdoc(inspect.getattr_static(getattr(moe_ep, owner), name)), f"{owner}.{name}"


@pytest.mark.parametrize("name", ON_THE_CLASS)
def test_settings_and_hints_are_asked_of_the_class(name: str) -> None:
    assert not inspect.isfunction(inspect.getattr_static(moe_ep.Buffer, name))


def test_errors_are_caught_as_the_builtin_ones() -> None:
    assert issubclass(moe_ep.EPTimeoutError, RuntimeError)
    assert issubclass(moe_ep.ConfigError, ValueError)


def test_the_functions_take_their_settings_by_these_names() -> None:
    taken = inspect.signature(moe_ep.dispatch).parameters
    assert list(taken) == "buffer x topk_idx topk_weights num_experts layout alignment max_rows".split()
    assert (taken["layout"].default, taken["alignment"].default, taken["max_rows"].default) == ("expert_major", 1, None)
    taken = inspect.signature(moe_ep.combine).parameters
    assert list(taken) == "buffer rows handle topk_weights exact".split()
    assert (taken["topk_weights"].default, taken["exact"].default) == (None, False)
    taken = inspect.signature(moe_ep.Buffer).parameters
    assert {"group", "backend", "expert_placement", "num_sms", "timeout_secs"} <= set(taken)
    assert taken["backend"].default == "auto"


def test_the_lines_of_the_overview_run() -> None:
    """One rank: layer, router, functions, and what their results are called."""
    router = RouterConfig(topk=2, score_function="sigmoid", expert_bias=True)
    config = MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=4, router=router, ep=EPConfig(size=1))
    layer = moe_ep.MoELayer(config, ep_group=None)
    y = layer(torch.ones(2, 3, 8))
    assert y.shape == (2, 3, 8)
    y.sum().backward()
    layer.update_expert_bias()
    assert {"tokens_per_expert", "dropped", "max_over_mean_load"} <= set(layer.routing_stats())
    x = torch.ones(3, 8)
    topk_idx, topk_weights = moe_ep.TopKRouter(config)(x)
    with moe_ep.Buffer() as buf:
        out = moe_ep.dispatch(buf, x, topk_idx, topk_weights, num_experts=4, layout="expert_major", alignment=2)
        assert {field.name for field in dataclasses.fields(out)} == set(OUTPUTS)
        assert moe_ep.combine(buf, out.x, out.handle, topk_weights=None, exact=False).shape == x.shape
        fixed = moe_ep.dispatch(buf, x, topk_idx, num_experts=4, layout="compact", max_rows=5)
        assert (fixed.tokens_per_expert, fixed.real_tokens_per_expert) == (None, None)
        assert fixed.expert_counts.dtype == fixed.expert_offsets.dtype == torch.int32
        assert (fixed.expert_counts.shape, fixed.expert_offsets.shape) == ((4,), (5,))
        assert buf.empty((2, 8), torch.bfloat16).shape == (2, 8)
        buf.check()
        buf.reset()
