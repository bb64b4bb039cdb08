"""A drop-in Mixture-of-Experts layer with expert parallelism for pretraining."""

from moe_ep.autograd.combine import combine
from moe_ep.autograd.dispatch import dispatch
from moe_ep.buffer import Buffer
from moe_ep.errors import ConfigError, EPTimeoutError
from moe_ep.handle import DispatchHandle, DispatchOutput

__all__ = ["Buffer", "ConfigError", "DispatchHandle", "DispatchOutput", "EPTimeoutError", "combine", "dispatch"]
