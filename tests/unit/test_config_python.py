"""Models built in Python: strict types, the sentences of the loader, frozen, copied with checks."""

import copy
import pickle
from typing import Any

import pytest
import yaml

from moe_ep.config import Config, EPConfig, FP8Config, MoEConfig, RouterConfig, Section, load_config
from moe_ep.errors import ConfigError

SIZES: dict[str, Any] = {"hidden_size": 8, "ffn_hidden_size": 16, "num_experts": 8}


def moe() -> MoEConfig:
    return MoEConfig(**SIZES, router=RouterConfig(topk=2))


def test_the_defaults_are_those_of_the_reference() -> None:
    assert moe().model_dump() == {
        **SIZES,
        "activation": "swiglu",
        "shared_ffn_hidden_size": None,
        "init_std": 0.02,
        "router": {
            "topk": 2,
            "score_function": "softmax",
            "pre_softmax": True,
            "normalize": False,
            "scaling_factor": 1.0,
            "num_groups": None,
            "group_topk": None,
            "group_score": "top2",
            "expert_bias": False,
            "bias_update_rate": 1e-3,
            "aux_loss_coef": 0.0,
            "seq_aux_loss_coef": 0.0,
            "global_aux_loss_coef": 0.0,
            "z_loss_coef": 0.0,
            "batch_first": True,
            "capacity_factor": None,
            "drop_policy": "weight",
        },
        "ep": {
            "size": "auto",
            "backend": "auto",
            "ranks_per_node": None,
            "hop": "auto",
            "comm_sms": None,
            "timeout_secs": 100.0,
            "alignment": 1,
            "exact": False,
        },
        "fp8": {
            "recipe": "none",
            "gemm": "te",
            "dispatch": True,
            "grad_dispatch": False,
            "power_of_two_scales": True,
            "wgrad": "fp8",
        },
    }


TOPK = "set it to an integer from 1 to 64 (experts per token, K)."


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (RouterConfig, {"topk": 0}, f"moe.router.topk is 0; {TOPK}"),
        (RouterConfig, {"topk": 2.0}, f"moe.router.topk is 2.0; {TOPK}"),
        (RouterConfig, {"topk": "2"}, f"moe.router.topk is '2'; {TOPK}"),
        (RouterConfig, {"topk": True}, f"moe.router.topk is true; {TOPK}"),
        (RouterConfig, {"topk": None}, f"moe.router.topk is null; {TOPK}"),
        (
            RouterConfig,
            {"topk": 2, "normalize": 1},
            "moe.router.normalize is 1; set it to true or false (divide the K weights by their sum).",
        ),
        (
            RouterConfig,
            {"topk": 2, "scaling_factor": float("nan")},
            "moe.router.scaling_factor is nan; set it to a finite number above 0 "
            "(factor on the weights, after normalising).",
        ),
        (EPConfig, {"sise": 2}, "moe.ep.sise is not a setting. Did you mean size?"),
        (
            EPConfig,
            {"backend": "gloo"},
            "moe.ep.backend is 'gloo'; set it to one of auto, torch, intranode, internode (what moves the rows).",
        ),
        (
            FP8Config,
            {"recipe": "mxfp4"},
            "moe.fp8.recipe is 'mxfp4'; set it to one of none, blockwise, current, delayed, mxfp8 (scaling recipe). "
            "Did you mean mxfp8?",
        ),
        (MoEConfig, SIZES, "moe.router is missing; add it under moe: a section with at least topk."),
    ],
)
def test_a_wrong_value_is_a_config_error_with_the_sentence_of_the_loader(
    section: type[Section], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        section(**values)
    assert str(raised.value) == message
    with pytest.raises(ConfigError) as raised:
        section.model_validate(values)
    assert str(raised.value) == message


def test_what_is_not_a_map_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="the configuration is not valid: Input should be a valid dictionary"):
        Config.model_validate([1])


def test_problems_of_nested_sections_are_told_together() -> None:
    with pytest.raises(ConfigError) as raised:
        MoEConfig(**{**SIZES, "hidden_size": 0, "router": {"topk": 0, "tpk": 1}, "ep": {"size": -1}})
    assert [line.split(" is ")[0] for line in str(raised.value).splitlines()] == [
        "moe.hidden_size",
        "moe.router.topk",
        "moe.router.tpk",
        "moe.ep.size",
    ]


def test_a_config_error_is_a_value_error_and_travels_between_processes() -> None:
    with pytest.raises(ValueError, match="moe.router.topk") as raised:
        RouterConfig(topk=0)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_config_is_frozen_and_hashable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        moe().num_experts = 4
    assert hash(moe()) == hash(moe())
    assert {moe(): 1}[moe()] == 1


def test_a_changed_copy_is_checked() -> None:
    changed = moe().model_copy(update={"num_experts": 16})
    assert (changed.num_experts, moe().num_experts) == (16, 8)
    assert changed.router == moe().router
    with pytest.raises(ConfigError, match="moe.router.topk is 2, but the number of experts"):
        moe().model_copy(update={"num_experts": 1})
    with pytest.raises(ConfigError, match="moe.num_expert is not a setting. Did you mean num_experts?"):
        moe().model_copy(update={"num_expert": 1})
    assert moe().model_copy() == moe()


def test_a_config_survives_a_dictionary_pickle_and_deepcopy() -> None:
    config = Config(moe=moe())
    assert Config.model_validate(config.model_dump()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_a_printed_config_loads_as_the_same_config(tmp_path: Any) -> None:
    config = Config(moe=moe().model_copy(update={"init_std": 1e-17, "ep": EPConfig(size=1, timeout_secs=1e20)}))
    file = tmp_path / "printed.yaml"
    file.write_text(yaml.safe_dump(config.model_dump()))
    assert load_config(file) == config
