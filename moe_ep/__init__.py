"""A drop-in Mixture-of-Experts layer with expert parallelism for pretraining."""

from moe_ep import integrations, parallel, utils
from moe_ep.autograd.combine import combine
from moe_ep.autograd.dispatch import dispatch
from moe_ep.autograd.dispatch_fp8 import dispatch_fp8
from moe_ep.buffer import Buffer
from moe_ep.config import load_config
from moe_ep.deep_ep_v1.config import Config, topk_idx_t
from moe_ep.errors import ConfigError, EPTimeoutError
from moe_ep.event import EventHandle, EventOverlap
from moe_ep.handle import DispatchHandle, DispatchOutput
from moe_ep.layers.checkpoint import load_checkpoint, save_checkpoint
from moe_ep.layers.experts import GroupedExperts
from moe_ep.layers.moe import MoELayer
from moe_ep.layers.router import TopKRouter
from moe_ep.layers.shared_experts import SharedExperts

__all__ = [
    "Buffer",
    "Config",
    "ConfigError",
    "DispatchHandle",
    "DispatchOutput",
    "EPTimeoutError",
    "EventHandle",
    "EventOverlap",
    "GroupedExperts",
    "MoELayer",
    "SharedExperts",
    "TopKRouter",
    "combine",
    "dispatch",
    "dispatch_fp8",
    "integrations",
    "load_checkpoint",
    "load_config",
    "parallel",
    "save_checkpoint",
    "topk_idx_t",
    "utils",
]
