"""Transformer Engine: its grouped GEMM over our FP8 matrices, and its tensors at both ends of a dispatch.

Releases 2.3 and later ones of 2 are served, tested to 2.20. What differs between them is found by looking at
signatures, in `TransformerEngine` alone; nothing is imported before a call asks for it. Transformer Engine's own
`GroupedLinear` refuses FP8 input, so the layer calls the GEMM beneath it. Unlike the other integrations this module
stands below the layers: it imports nothing of the package but records.

Letters: T tokens, H hidden, B = ceil(H / 128), N rows and K columns of a matrix.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ep.fp8 import num_blocks
from moe_ep.fp8.matrix import Fp8Matrices, Fp8Matrix
from moe_ep.fp8.rows import Fp8Rows

OLDEST, NEWEST = (2, 3), (2, 20)  # the newest is what the tests have seen
_HOME = "transformer_engine.pytorch"
_NEEDED = {"blockwise": (9, 0), "current": (8, 9), "delayed": (8, 9), "mxfp8": (10, 0)}  # compute capability


class TransformerEngine:
    """What this install of Transformer Engine offers of the parts that are used here.

    Attributes:
        version: (major, minor).
    """

    def __init__(self) -> None:
        """Import the parts.

        Raises:
            ImportError: Transformer Engine, or a part of it that is needed, is not there.
        """
        self.version = _version_of(importlib.metadata.version("transformer-engine"))
        importlib.import_module(_HOME)  # loads the shared libraries that the extension needs
        self._extension: Any = importlib.import_module("transformer_engine_torch")
        self._gemm: Any = importlib.import_module(f"{_HOME}.cpp_extensions").general_grouped_gemm
        # The storage classes moved and were renamed in 2.9.
        self._block_storage: Any = _first_of(
            ("tensor.storage.float8_blockwise_tensor_storage", "Float8BlockwiseQTensorStorage"),
            ("tensor._internal.float8_blockwise_tensor_base", "Float8BlockwiseQTensorBase"),
        )
        self._tensor_storage: Any = _first_of(
            ("tensor.storage.float8_tensor_storage", "Float8TensorStorage"),
            ("tensor._internal.float8_tensor_base", "Float8TensorBase"),
        )
        blockwise: Any = importlib.import_module(f"{_HOME}.tensor.float8_blockwise_tensor")
        self._block_tensor, self._block_quantizer = blockwise.Float8BlockwiseQTensor, blockwise.Float8BlockQuantizer
        self._float8_tensor: Any = importlib.import_module(f"{_HOME}.tensor.float8_tensor").Float8Tensor
        # From 2.17 on Python has its own enumeration, to which every record would convert the extension's.
        kinds = getattr(importlib.import_module(_HOME), "DType", self._extension.DType)
        self._kinds = {torch.float8_e4m3fn: kinds.kFloat8E4M3, torch.float8_e5m2: kinds.kFloat8E5M2}
        self._options = self._gemm_options()
        self._takes_params = "quantization_params" in inspect.signature(self._gemm).parameters  # from 2.12
        self._block_options = self._storage_options(self._block_storage)
        self._tensor_options = self._storage_options(self._tensor_storage)

    def _gemm_options(self) -> dict[str, Any]:
        """Arguments that some releases want and others do not know."""
        known = inspect.signature(self._gemm).parameters
        options: dict[str, Any] = {"layout": "TN", "use_split_accumulator": True}
        if "workspaces" in known:  # until 2.8 the caller brings them
            base = importlib.import_module(f"{_HOME}.module.base")
            options["workspaces"] = base.get_multi_stream_cublas_workspace()
        return options

    def _storage_options(self, storage: Any) -> dict[str, Any]:
        known = inspect.signature(storage.__new__).parameters
        options: dict[str, Any] = {}
        if "data_format" in known:  # 2.5 to 2.11: the layout that the GEMM reads, or one that only travels
            options["data_format"] = self._extension.Float8BlockScaleTensorFormat.GEMM_READY
        if "fake_dtype" in known:  # from 2.14
            options["fake_dtype"] = torch.bfloat16
        return options

    # -- GEMM ---------------------------------------------------------------------------------------------------------

    def grouped_gemm(self, a: Fp8Matrices, b: Fp8Matrices, outs: Sequence[Tensor]) -> None:
        """outs[i] = b[i] @ a[i].T; see `moe_ep.layers.fp8.gemm.GroupedGemm`."""
        lefts, rights = self._records(a), self._records(b)
        busy = [at for at, codes in enumerate(b.codes) if codes.numel()]
        if len(busy) < len(outs):
            for out, codes in zip(outs, b.codes, strict=True):
                if not codes.numel():
                    out.zero_()
            lefts, rights, outs = ([each[at] for at in busy] for each in (lefts, rights, outs))
        if not busy:
            return
        options = dict(self._options)
        if self._takes_params:
            options["quantization_params"] = [None] * len(busy)
        num_rows = [b.codes[at].shape[0] for at in busy]
        self._gemm(lefts, rights, list(outs), out_dtype=outs[0].dtype, m_splits=num_rows, **options)

    def _records(self, matrices: Fp8Matrices) -> list[Any]:
        """Transformer Engine's records of the matrices, over the same memory; kept, since weights come again.

        These are its storages, which are no tensors: hundreds a step are made, and a tensor subclass takes ten times as
        long.
        """
        if matrices.memo is None:
            kind, pairs = self._kinds[matrices.dtype], zip(matrices.codes, matrices.scales, strict=True)
            if matrices.scaling == "tensor":
                make = functools.partial(self._tensor_storage, fp8_dtype=kind, quantizer=None, **self._tensor_options)
                matrices.memo = [make(data=codes, fp8_scale_inv=scale) for codes, scale in pairs]
            else:
                make = functools.partial(
                    self._block_storage,
                    columnwise_data=None,
                    columnwise_scale_inv=None,
                    fp8_dtype=kind,
                    quantizer=None,
                    is_2D_scaled=matrices.scaling == "tiles",
                    **self._block_options,
                )
                matrices.memo = [make(rowwise_data=codes, rowwise_scale_inv=scales) for codes, scales in pairs]
        records: list[Any] = matrices.memo
        return records

    # -- tensors ------------------------------------------------------------------------------------------------------

    def tensor_of(self, matrix: Fp8Matrix, dtype: torch.dtype = torch.bfloat16, power_of_two: bool = True) -> Tensor:
        """The matrix as a `Float8BlockwiseQTensor`, or as a `Float8Tensor` where it has one scale; no copy.

        Args:
            matrix: [N, K].
            dtype: the dtype that the tensor pretends to have.
            power_of_two: whether its quantizer rounds scales so.
        """
        data, kind = matrix.data.view(torch.uint8), self._kinds[matrix.data.dtype]
        shared: dict[str, Any] = {"shape": tuple(data.shape), "dtype": dtype, "fp8_dtype": kind}
        if "device" in inspect.signature(importlib.import_module(f"{_HOME}.tensor").QuantizedTensor.__new__).parameters:
            shared["device"] = data.device  # the current GPU otherwise
        if matrix.scaling == "tensor":
            tensor: Tensor = self._float8_tensor(data=data, fp8_scale_inv=matrix.scales, **shared)
            return tensor
        quantizer = self._block_quantizer(
            kind,
            rowwise=True,
            columnwise=False,
            force_pow_2_scales=power_of_two,
            block_scaling_dim=2 if matrix.scaling == "tiles" else 1,
        )
        blocks: Tensor = self._block_tensor(
            rowwise_data=data,
            rowwise_scale_inv=matrix.scales,
            columnwise_data=None,
            columnwise_scale_inv=None,
            quantizer=quantizer,
            is_2D_scaled=matrix.scaling == "tiles",
            **shared,
        )
        return blocks


def tensors_per_expert(rows: Fp8Rows, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """FP8 rows of a dispatch as one Transformer Engine tensor an expert, without a copy of the rows.

    They are cut off from the graph; who uses them gives the gradient of the rows to `rows.face`.

    Args:
        rows: of `moe_ep.dispatch_fp8`.
        dtype: the dtype that the tensors pretend to have.

    Returns:
        L tensors [rows, H]: `Float8BlockwiseQTensor`, or `Float8Tensor` where all rows share one scale.

    Raises:
        ImportError: Transformer Engine is not there.
    """
    engine = require()
    return [engine.tensor_of(matrix, dtype) for matrix in rows.matrices()]


def is_quantized(x: object) -> bool:
    """Whether x is an FP8 tensor of Transformer Engine: it pretends to be bfloat16 and dequantises when touched."""
    return isinstance(x, Tensor) and (hasattr(x, "_rowwise_data") or hasattr(x, "_scale_inv"))


def payload_of(x: Any) -> tuple[Tensor, Tensor]:
    """The bytes and scales of a Transformer Engine tensor as they travel.

    Args:
        x: `Float8BlockwiseQTensor` [T, H] with 1x128 blocks, or `Float8Tensor` [T, H]; e4m3, row-wise data present.

    Returns:
        [T, H] float8_e4m3fn, and the scales: [T, B] float32, any strides, or [1] for a `Float8Tensor`.

    Raises:
        ValueError: it has no row-wise e4m3 data, or another block shape.
    """
    if hasattr(x, "_rowwise_data"):  # without `_is_2D_scaled` it is MXFP8 or NVFP4, which have other blocks
        data, scales, is_vector = x._rowwise_data, x._rowwise_scale_inv, not getattr(x, "_is_2D_scaled", True)
    else:
        data, scales, is_vector = getattr(x, "_data", None), x._scale_inv, True
    if not is_vector or data is None or data.dim() != 2 or int(x._fp8_dtype) != int(_e4m3(x._fp8_dtype)):
        raise ValueError(
            f"x is a {type(x).__name__} of shape {list(x.shape)}, but row-wise e4m3 data [T, H] travels, in "
            "1x128 blocks or with one scale; quantise it so, with rowwise=True."
        )
    codes = data.view(torch.float8_e4m3fn)
    if not hasattr(x, "_rowwise_data"):
        return codes, scales.reshape(1)
    num_tokens, blocks = data.shape[0], num_blocks(data.shape[1])
    if scales.shape == (num_tokens, blocks) and str(getattr(x, "_data_format", "")).endswith("COMPACT"):
        return codes, scales
    return codes, scales[:blocks, :num_tokens].t()


def _e4m3(kind: Any) -> Any:
    """e4m3 in the enumeration that `kind` is from: there are two of them from 2.17 on."""
    return type(kind).kFloat8E4M3


@functools.cache
def load() -> TransformerEngine | ImportError:
    """This install's Transformer Engine, or why it cannot be imported."""
    try:
        return TransformerEngine()
    except (ImportError, OSError, AttributeError) as error:  # PackageNotFoundError is an ImportError
        return ImportError(f"{type(error).__name__}: {error}")


def require() -> TransformerEngine:
    """This install's Transformer Engine.

    Raises:
        ImportError: there is none.
    """
    engine = load()
    if isinstance(engine, ImportError):
        raise engine
    return engine


def why_unavailable(recipe: str) -> str | None:
    """Why this machine cannot run the recipe, as the middle of a sentence; None if it can."""
    needed = _NEEDED[recipe]
    has = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if has is None or has < needed:
        found = "no CUDA GPU" if has is None else f"compute capability {has[0]}.{has[1]}"
        return f"it needs a GPU of compute capability {needed[0]}.{needed[1]} or newer, and this machine has {found}"
    if recipe == "mxfp8":
        return "this version casts to 1x128 blocks and to whole tensors only, not to the 1x32 blocks of mxfp8"
    engine = load()
    if isinstance(engine, ImportError):
        return (
            f"Transformer Engine does not load here ({engine}): install it against this PyTorch with pip install "
            '--no-build-isolation "transformer-engine[pytorch]"'
        )
    if not OLDEST <= engine.version < (OLDEST[0] + 1, 0):
        return (
            f"Transformer Engine {engine.version[0]}.{engine.version[1]} is installed, and {OLDEST[0]}.{OLDEST[1]} and "
            f"later releases of {OLDEST[0]} are served: install one of these"
        )
    return None


def _version_of(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _first_of(*places: tuple[str, str]) -> Any:
    """The first class that is there, of (module below transformer_engine.pytorch, name) pairs."""
    for module, name in places[:-1]:
        try:
            return getattr(importlib.import_module(f"{_HOME}.{module}"), name)
        except (ImportError, AttributeError):
            continue
    module, name = places[-1]
    return getattr(importlib.import_module(f"{_HOME}.{module}"), name)
