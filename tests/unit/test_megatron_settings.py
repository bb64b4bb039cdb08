"""What passes between Megatron-Core's configuration and ours, which versions are served, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import pickle
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ep.config import EPConfig, FP8Config, MoEConfig, RouterConfig
from moe_ep.errors import ConfigError

if importlib.util.find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed: pip install --no-deps 'megatron-core>=0.16,<0.17' tqdm packaging",
                allow_module_level=True)  # fmt: skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron has one for each package that could be installed
    from megatron.core.transformer.spec_utils import ModuleSpec

    from moe_ep.integrations import megatron, megatron_settings, megatron_versions
    from moe_ep.integrations.megatron_settings import Settings, check_config


def megatron_config(**changes: Any) -> SimpleNamespace:
    fields = {
        "fp8": None, "fp8_recipe": "delayed", "fp4": None, "moe_router_padding_for_quantization": False,
        "overlap_moe_expert_parallel_comm": False, "moe_token_dispatcher_type": "alltoall",
        "moe_flex_dispatcher_backend": "deepep", "use_transformer_engine_op_fuser": False,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def moe_config(router: dict[str, Any] | None = None, **changes: Any) -> MoEConfig:
    return MoEConfig(
        hidden_size=64,
        ffn_hidden_size=32,
        num_experts=8,
        router=RouterConfig(**{"topk": 2, **(router or {})}),
        **changes,
    )


# -- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.16.0", "0.16.1", "0.17.1", "0.18.2", "0.19.2", "0.19.0rc1"])
def test_a_known_version_is_taken(version: str) -> None:
    megatron_versions.check_version(version)


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0", "1.0.0"])
def test_an_unknown_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(ImportError, match=rf"megatron-core {re.escape(version)} is installed; .*0\.16 to 0\.19"):
        megatron_versions.check_version(version)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"moe_deepep_num_sms": 24}, 24),  # 0.16
        ({"moe_deepep_num_sms": 24, "moe_hybridep_num_sms": 16, "moe_flex_dispatcher_backend": "hybridep"}, 16),
        ({"moe_flex_dispatcher_num_sms": 32, "moe_deepep_num_sms": None}, 32),  # 0.19
        ({"moe_flex_dispatcher_num_sms": None, "moe_deepep_num_sms": None}, None),
    ],
)
def test_the_sm_budget_is_read_under_the_name_of_each_version(fields: dict[str, Any], expected: int | None) -> None:
    assert megatron_versions.num_sms(megatron_config(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "own", "expected"),
    [({}, 1, 1), ({}, 16, 16), ({"fp8": "hybrid"}, 1, 16), ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 1, 32),
     ({"fp8": "hybrid", "moe_router_padding_for_quantization": True}, 6, 48)],
)  # fmt: skip
def test_rows_are_aligned_as_fp8_and_the_file_ask(fields: dict[str, Any], own: int, expected: int) -> None:
    assert Settings(alignment=own).alignment_for(megatron_config(**fields)) == expected


class Base:
    pass


class Ours(Base):
    pass


def test_both_forms_of_a_layer_spec_take_our_layer() -> None:
    old = ModuleSpec(module=Base, params={"a": 1}, submodules="parts")
    new = megatron_versions.with_moe_layer(old, Ours, Base, "groups", settings=7)
    assert (new.module, new.params, new.submodules) == (
        Ours,
        {"a": 1, "pg_collection": "groups", "settings": 7},
        "parts",
    )
    assert (old.module, old.params) == (Base, {"a": 1})  # the given one is as it was
    partial = megatron_versions.with_moe_layer(functools.partial(Base, submodules="parts"), Ours, Base, settings=7)
    assert (partial.func, partial.keywords) == (Ours, {"submodules": "parts", "settings": 7})


@pytest.mark.parametrize("dense", [ModuleSpec(module=dict), functools.partial(dict), dict])
def test_a_dense_layer_stays_as_it_is(dense: Any) -> None:
    assert megatron_versions.with_moe_layer(dense, Ours, Base, settings=7) is dense


# -- settings ---------------------------------------------------------------------------------------------------------


def test_a_file_gives_the_settings_of_its_section_ep() -> None:
    ep = EPConfig(
        backend="internode",
        comm_sms=12,
        timeout_secs=5.0,
        alignment=8,
        exact=True,
        size=4,
        ranks_per_node=2,
        hop="torch",
    )
    given = {"num_sms" if name == "comm_sms" else name: value for name, value in ep}
    assert vars(Settings.of(ep)) == given
    assert not given.items() & vars(Settings()).items()  # none is at its default, so none can be forgotten
    assert Settings.of(Path(__file__).parents[2] / "configs" / "megatron_tiny.yaml") == Settings(timeout_secs=60.0)
    assert Settings.of(None) == Settings()


def test_the_buffer_knows_the_nodes_of_the_settings() -> None:
    config = megatron_config(moe_deepep_num_sms=20)
    settings = Settings(backend="internode", ranks_per_node=1, hop="torch")
    buffer = megatron_settings.shared_buffer(config, None, settings)
    assert (buffer.backend_name, buffer.num_sms) == ("internode", 20)
    with pytest.raises(ConfigError, match="ranks_per_node is 2, but the EP group has 1 rank"):
        megatron_settings.shared_buffer(config, None, dataclasses.replace(settings, ranks_per_node=2))
    megatron_settings.close_buffers(config)


def test_another_number_of_ranks_than_the_file_says_is_refused() -> None:
    check_config(megatron_config(), Settings(size=4), 4)
    with pytest.raises(ConfigError, match=r"moe\.ep\.size is 4, but Megatron shares the experts between 2 ranks"):
        check_config(megatron_config(), Settings(size=4), 2)


@pytest.mark.parametrize(("kind", "backend"), [("alltoall", "deepep"), ("flex", "deepep")])
def test_a_schedule_that_frees_the_rows_is_refused(kind: str, backend: str) -> None:
    config = megatron_config(
        overlap_moe_expert_parallel_comm=True, moe_token_dispatcher_type=kind, moe_flex_dispatcher_backend=backend
    )
    with pytest.raises(
        ConfigError, match="overlap_moe_expert_parallel_comm is on .*='hybridep', for which it keeps them"
    ):
        check_config(config, Settings(), 2)
    config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = "flex", "hybridep"
    check_config(config, Settings(), 2)


def test_buffers_stay_with_a_copied_configuration_and_out_of_a_pickled_one() -> None:
    exchanges = megatron_settings._Exchanges({("key",): object()})  # type: ignore[dict-item]
    assert copy.deepcopy(exchanges) is exchanges
    assert pickle.loads(pickle.dumps(exchanges)).buffers == {}


# -- from our file to Megatron's fields -------------------------------------------------------------------------------


def test_every_setting_of_the_layer_has_its_field() -> None:
    router = {
        "topk": 4, "score_function": "sigmoid", "normalize": True, "scaling_factor": 2.5, "num_groups": 4,
        "group_topk": 2, "group_score": "top2", "expert_bias": True, "bias_update_rate": 1e-2,
        "aux_loss_coef": 0.1, "seq_aux_loss_coef": 0.2, "z_loss_coef": 0.3, "capacity_factor": 1.5,
        "drop_policy": "position",
    }  # fmt: skip
    fields = megatron.transformer_fields(moe_config(router, shared_ffn_hidden_size=16))
    assert fields == {
        "hidden_size": 64, "num_moe_experts": 8, "moe_ffn_hidden_size": 32, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "moe_shared_expert_intermediate_size": 16, "moe_router_topk": 4, "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False, "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 4,
        "moe_router_group_topk": 2, "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-2,
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2],
        "moe_z_loss_coeff": 0.3, "moe_router_dtype": "fp32", "moe_expert_capacity_factor": 1.5,
        "moe_token_drop_policy": "position",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("router", "pre_softmax"),
    [
        ({"pre_softmax": True, "normalize": False}, True),
        ({"pre_softmax": False, "normalize": False}, False),
        ({"pre_softmax": False, "normalize": True}, False),
        ({"pre_softmax": True, "normalize": True}, False),  # the softmax over the K chosen is the same
    ],
)
def test_softmax_and_normalising_become_megatrons_order(router: dict[str, Any], pre_softmax: bool) -> None:
    assert megatron.transformer_fields(moe_config(router))["moe_router_pre_softmax"] is pre_softmax


@pytest.mark.parametrize(
    ("router", "sentence"),
    [
        ({"score_function": "sigmoid"}, r"moe\.router\.normalize is false with sigmoid scores and topk 2"),
        ({"topk": 1, "normalize": True}, r"moe\.router\.normalize is true .* groups or topk 1"),
        ({"topk": 2, "num_groups": 4, "group_topk": 2}, r"group_score is top2; .* topk // group_topk = 1 experts"),
        ({"topk": 4, "num_groups": 4, "group_topk": 2, "group_score": "max"}, r"group_score is max; .* = 2 experts"),
    ],
)
def test_what_megatron_has_no_counterpart_of_is_refused(router: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        megatron.transformer_fields(moe_config(router))


def test_fp8_is_left_to_megatrons_own_fields() -> None:
    with pytest.raises(
        ConfigError, match=r"moe\.fp8\.recipe is blockwise; in Megatron-Core FP8 is asked for by its own"
    ):
        megatron.transformer_fields(moe_config(fp8=FP8Config(recipe="blockwise")))
