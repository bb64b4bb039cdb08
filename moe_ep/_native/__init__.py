"""The CUDA extension `moe_ep._C`: finding it (`loader`), the types of its parts, what a call is given (`arguments`)."""

from moe_ep._native.loader import NativeKernels, describe, load, require

__all__ = ["NativeKernels", "describe", "load", "require"]
