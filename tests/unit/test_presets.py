"""Every file in configs/ loads, and the named models have their published numbers (config.json and reports)."""

from pathlib import Path
from typing import Any

import pytest

from moe_ep.config import Config, count_parameters, load_config

CONFIGS = Path(__file__).parents[2] / "configs"

PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral_8x7b": {
        "moe": {
            "hidden_size": 4096,
            "ffn_hidden_size": 14336,
            "num_experts": 8,
            "activation": "swiglu",
            "shared_ffn_hidden_size": None,
            "init_std": 0.02,
        },
        "router": {"topk": 2, "score_function": "softmax", "pre_softmax": False, "num_groups": None,
                   "aux_loss_coef": 0.02},
        "model": {"vocab_size": 32000, "hidden_size": 4096, "num_layers": 32, "num_dense_layers": 0, "num_heads": 32,
                  "max_seq_len": 32768, "rope_theta": 1e6, "norm_eps": 1e-5},
    },
    "qwen3_30b_a3b": {
        "moe": {
            "hidden_size": 2048,
            "ffn_hidden_size": 768,
            "num_experts": 128,
            "activation": "swiglu",
            "shared_ffn_hidden_size": None,
            "init_std": 0.02,
        },
        "router": {"topk": 8, "score_function": "softmax", "pre_softmax": True, "normalize": True, "num_groups": None,
                   "aux_loss_coef": 0.001},
        "model": {"vocab_size": 151936, "hidden_size": 2048, "num_layers": 48, "num_dense_layers": 0, "num_heads": 32,
                  "dense_ffn_hidden_size": 6144, "max_seq_len": 40960, "rope_theta": 1e6, "norm_eps": 1e-6},
    },
    "deepseek_v2_lite": {
        "moe": {
            "hidden_size": 2048,
            "ffn_hidden_size": 1408,
            "num_experts": 64,
            "activation": "swiglu",
            "shared_ffn_hidden_size": 2 * 1408,
            "init_std": 0.02,
        },
        "router": {"topk": 6, "score_function": "softmax", "pre_softmax": True, "normalize": False,
                   "scaling_factor": 1.0, "num_groups": None, "group_topk": None, "expert_bias": False,
                   "seq_aux_loss_coef": 0.001},
        "model": {"vocab_size": 102400, "hidden_size": 2048, "num_layers": 27, "num_dense_layers": 1, "num_heads": 16,
                  "dense_ffn_hidden_size": 10944, "max_seq_len": 163840, "rope_theta": 1e4, "norm_eps": 1e-6},
    },
    "deepseek_v3": {
        "moe": {
            "hidden_size": 7168,
            "ffn_hidden_size": 2048,
            "num_experts": 256,
            "activation": "swiglu",
            "shared_ffn_hidden_size": 2048,
            "init_std": 0.006,
        },
        "router": {"topk": 8, "score_function": "sigmoid", "normalize": True, "scaling_factor": 2.5, "num_groups": 8,
                   "group_topk": 4, "group_score": "top2", "expert_bias": True, "bias_update_rate": 1e-3,
                   "aux_loss_coef": 0.0, "seq_aux_loss_coef": 1e-4},
        "model": {"vocab_size": 129280, "hidden_size": 7168, "num_layers": 61, "num_dense_layers": 3, "num_heads": 128,
                  "dense_ffn_hidden_size": 18432, "max_seq_len": 163840, "rope_theta": 1e4, "norm_eps": 1e-6},
    },
}  # fmt: skip


def load(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml")


def test_there_is_a_preset_for_every_model_named_here() -> None:
    assert {file.stem for file in CONFIGS.glob("*.yaml")} >= {"tiny_cpu", *PUBLISHED}


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_preset_loads(file: Path) -> None:
    config = load_config(file)
    assert config.model is not None
    assert config.moe.ep.size == "auto"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_numbers(name: str) -> None:
    config = load(name)
    sections = {"moe": config.moe, "router": config.moe.router, "model": config.model}
    for section, published in PUBLISHED[name].items():
        loaded = {setting: getattr(sections[section], setting) for setting in published}
        assert loaded == published


@pytest.mark.parametrize(
    ("name", "total_billions", "active_billions"),
    [
        ("mixtral_8x7b", 46.7, 12.9),
        ("qwen3_30b_a3b", 30.5, 3.3),
        ("deepseek_v2_lite", 15.7, 2.4),
        ("deepseek_v3", 671, 37),
    ],
)
def test_the_parameters_of_the_layers_fit_the_published_totals(
    name: str, total_billions: float, active_billions: float
) -> None:
    """The rest of each model, attention, dense layers and embeddings, is between 2 % and 9 % of the total."""
    config = load(name)
    assert config.model is not None
    layer = count_parameters(config.moe)
    num_moe_layers = config.model.num_layers - config.model.num_dense_layers
    assert 0.91 < num_moe_layers * layer.total / (total_billions * 1e9) < 0.98
    assert num_moe_layers * layer.active < active_billions * 1e9


def test_the_demo_is_shaped_like_deepseek_v3() -> None:
    demo, large = load("tiny_cpu"), load("deepseek_v3")
    assert demo.model is not None
    assert demo.train is not None
    for setting in ("score_function", "normalize", "group_score", "expert_bias", "capacity_factor"):
        assert getattr(demo.moe.router, setting) == getattr(large.moe.router, setting)
    assert demo.moe.router.num_groups is not None
    assert demo.moe.shared_ffn_hidden_size is not None
    assert demo.model.vocab_size == 256
    assert demo.model.num_dense_layers == 1


def test_every_line_of_the_demo_explains_itself() -> None:
    lines = (CONFIGS / "tiny_cpu.yaml").read_text().splitlines()
    bare = [line for line in lines if line.strip() and not line.rstrip().endswith(":") and "#" not in line]
    assert bare == []
