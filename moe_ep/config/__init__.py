"""Configuration: frozen models, and the loader that builds them from a YAML file."""

from moe_ep.config.derived import LayerParameters, count_parameters, experts_per_rank
from moe_ep.config.loader import load_config
from moe_ep.config.problems import ConfigProblems, Problem
from moe_ep.config.schema import (
    Config,
    EPConfig,
    FP8Config,
    ModelConfig,
    MoEConfig,
    RouterConfig,
    Section,
    TrainConfig,
)

__all__ = [
    "Config",
    "ConfigProblems",
    "EPConfig",
    "FP8Config",
    "LayerParameters",
    "ModelConfig",
    "MoEConfig",
    "Problem",
    "RouterConfig",
    "Section",
    "TrainConfig",
    "count_parameters",
    "experts_per_rank",
    "load_config",
]
