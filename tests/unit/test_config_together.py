"""Settings that cannot work together are refused at construction, with both numbers (case G05)."""

from typing import Any

import pytest

from moe_ep.config import Config, EPConfig, ModelConfig, MoEConfig, RouterConfig, TrainConfig
from moe_ep.errors import ConfigError


def moe(num_experts: int = 8, **router: Any) -> MoEConfig:
    return MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=num_experts, router=RouterConfig(**router))


@pytest.mark.parametrize(
    ("num_experts", "router", "message"),
    [
        (
            10,
            {"topk": 2, "num_groups": 4, "group_topk": 2},
            "moe.router.num_groups is 4, which does not divide moe.num_experts = 10. "
            "Set num_groups to one of 1, 2, 5, 10.",
        ),
        (
            8,
            {"topk": 3, "num_groups": 4, "group_topk": 1},
            "moe.router.topk is 3, but 1 of 4 groups hold only 2 of the 8 experts. "
            "Set topk to at most 2, or raise group_topk.",
        ),
        (
            8,
            {"topk": 9},
            "moe.router.topk is 9, but the number of experts (moe.num_experts) is 8. "
            "Set topk from 1 to 8, or use more experts.",
        ),
        (
            8,
            {"topk": 2, "num_groups": 4, "group_topk": 5},
            "moe.router.group_topk is 5, but there are only 4 groups (moe.router.num_groups). Set it from 1 to 4.",
        ),
        (8, {"topk": 0}, "moe.router.topk is 0; set it to an integer from 1 to 64 (experts per token, K)."),
        (
            8,
            {"topk": 2, "num_groups": 4},
            "moe.router.num_groups is 4 but moe.router.group_topk is null; groups need both. "
            "Give group_topk too, or remove num_groups.",
        ),
    ],
    ids=[
        "groups_divide_experts",
        "topk_in_groups",
        "topk_in_experts",
        "group_topk_in_groups",
        "topk_zero",
        "one_of_two",
    ],
)
def test_an_impossible_gate_is_refused(num_experts: int, router: dict[str, Any], message: str) -> None:
    # case G05 (a) to (f)
    with pytest.raises(ConfigError) as raised:
        moe(num_experts, **router)
    assert str(raised.value) == message


def test_group_topk_alone_is_refused_too() -> None:
    # case G05 (f)
    with pytest.raises(ConfigError, match="moe.router.group_topk is 2 but moe.router.num_groups is null"):
        moe(topk=2, group_topk=2)


def test_more_than_64_experts_per_token_are_refused() -> None:
    with pytest.raises(ConfigError, match="moe.router.topk is 65; set it to an integer from 1 to 64"):
        moe(128, topk=65)


def test_the_megatron_group_score_needs_an_expert_per_group() -> None:
    """It scores a group by its best topk // group_topk experts; zero of them would make all groups equal."""
    # case G05
    with pytest.raises(ConfigError, match="topk is 2 and group_topk is 3, so that is 0. Set group_topk to at most 2"):
        moe(topk=2, num_groups=4, group_topk=3, group_score="megatron")
    assert moe(topk=3, num_groups=4, group_topk=2, group_score="megatron").router.topk == 3


@pytest.mark.parametrize("group_score", ["top2", "max", "megatron"])
def test_the_limits_themselves_are_accepted(group_score: str) -> None:
    # case G05
    assert moe(topk=8, num_groups=1, group_topk=1, group_score=group_score)
    assert moe(topk=2, num_groups=4, group_topk=1, group_score=group_score)
    assert moe(topk=8, num_groups=8, group_topk=8, group_score=group_score)


def model(**changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "dense_ffn_hidden_size": 8, "max_seq_len": 16}
    return ModelConfig(**{"num_dense_layers": 1, **sizes, **changes})


def train(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 4, "global_batch_size": 4, "seq_len": 8, "lr": 0.1, **changes})


@pytest.mark.parametrize("num_heads", [3, 8])
def test_heads_have_an_even_width(num_heads: int) -> None:
    with pytest.raises(ConfigError, match=f"num_heads is {num_heads}, which does not split model.hidden_size = 8"):
        model(num_heads=num_heads)


def test_there_are_no_more_dense_layers_than_layers() -> None:
    assert model(num_dense_layers=2).num_dense_layers == 2
    with pytest.raises(ConfigError, match="model.num_dense_layers is 3, but model.num_layers is 2"):
        model(num_dense_layers=3)


def test_warm_up_and_micro_batch_fit_in_the_run() -> None:
    with pytest.raises(ConfigError) as raised:
        train(warmup_steps=5, micro_batch_size=8)
    assert str(raised.value).splitlines() == [
        "train.warmup_steps is 5, but train.steps is 4. Set warmup_steps from 0 to 4.",
        "train.micro_batch_size is 8, but train.global_batch_size is 4. Set micro_batch_size from 1 to 4.",
    ]


def test_the_sections_of_a_file_fit_each_other() -> None:
    assert Config(moe=moe(topk=2), model=model(), train=train())
    with pytest.raises(ConfigError) as raised:
        Config(moe=moe(topk=2), model=model(hidden_size=16, max_seq_len=4), train=train())
    assert str(raised.value).splitlines() == [
        "model.hidden_size is 16, but moe.hidden_size is 8. The layers share one token width: make the two equal.",
        "train.seq_len is 8, but model.max_seq_len is 4. Set seq_len to at most 4, or raise max_seq_len.",
    ]


@pytest.mark.parametrize(("name", "value", "without"), [("ranks_per_node", 8, "null"), ("hop", "nvshmem", "auto")])
def test_only_the_backend_between_nodes_knows_nodes(name: str, value: Any, without: str) -> None:
    assert getattr(EPConfig(backend="internode", **{name: value}), name) == value
    with pytest.raises(ConfigError) as raised:
        EPConfig(**{name: value})
    assert str(raised.value) == (
        f"moe.ep.{name} is {value}, but moe.ep.backend is auto, which knows no nodes. Set the backend to internode, or "
        f"{name} to {without}."
    )
