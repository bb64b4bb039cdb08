"""Stand-ins for Transformer Engine: the modules, names and signatures of a release, over PyTorch on the CPU.

Enough of it for `moe_ep.integrations.transformer_engine`: records of FP8 tensors and the grouped GEMM. The GEMM reads
scales through the layout that the real one documents, so a wrong layout gives wrong numbers here too.
"""

from __future__ import annotations

import enum
import importlib.metadata
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.integrations import transformer_engine

_LOAD = transformer_engine.load.__wrapped__  # without its memory
RELEASES = ("2.3.0", "2.5.0", "2.9.0", "2.12.0", "2.20.2")


class DType(enum.IntEnum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class ExtensionDType(enum.Enum):
    """The extension's own enumeration from 2.17 on, where `DType` is Python's. The products here know only that."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8

    def __int__(self) -> int:
        return int(self.value)


class Format(enum.Enum):
    GEMM_READY = 0
    COMPACT = 1


class Record:
    """A storage; `allowed` are the keywords that this release knows."""

    allowed: tuple[str, ...] = ()

    def __init__(self, **values: Any) -> None:
        unknown = set(values) - set(self.allowed)
        missing = {name for name in self.allowed if name not in values and name != "fake_dtype"}
        if unknown or missing:
            raise TypeError(f"unexpected {unknown}, missing {missing}")
        self.__dict__.update({f"_{name}": value for name, value in values.items()})


def _dequantized(record: Any) -> Tensor:
    data = getattr(record, "_rowwise_data", None)
    kinds = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
    if data is None:
        return record._data.view(kinds[record._fp8_dtype]).double() * record._fp8_scale_inv.double()
    num_rows, width = data.shape
    scales = record._rowwise_scale_inv.double()
    blocks = -(-width // 128)
    if record._is_2D_scaled:
        assert scales.shape == (-(-num_rows // 128), -(-blocks // 4) * 4)
        per_row = scales[torch.arange(num_rows) // 128, :blocks]
    else:
        assert scales.shape == (blocks, -(-num_rows // 4) * 4)
        per_row = scales[:, :num_rows].t()
    assert data.is_contiguous()
    assert record._rowwise_scale_inv.is_contiguous()
    return data.view(kinds[record._fp8_dtype]).double() * per_row[:, torch.arange(width) // 128]


def _multiply(a: list[Any], b: list[Any], out: list[Tensor], layout: str, m_splits: list[int]) -> None:
    assert layout == "TN"
    assert len(m_splits) == len(a) == len(b) == len(out)
    for left, right, target in zip(a, b, out, strict=True):
        target.copy_(_dequantized(right) @ _dequantized(left).t())


def _gemm_of(release: tuple[int, int]) -> Callable[..., Any]:
    if release < (2, 9):

        def with_workspaces(
            A: Any, B: Any, out: Any, out_dtype: Any, workspaces: Any, layout: str = "TN", m_splits: Any = None,
            use_split_accumulator: bool = False,
        ) -> None:  # fmt: skip
            assert workspaces == ["workspace"]
            _multiply(A, B, out, layout, m_splits)

        return with_workspaces
    if release < (2, 12):

        def plain(
            A: Any, B: Any, out: Any, out_dtype: Any, layout: str = "TN", m_splits: Any = None,
            use_split_accumulator: bool = False,
        ) -> None:  # fmt: skip
            _multiply(A, B, out, layout, m_splits)

        return plain

    def with_params(
        A: Any, B: Any, out: Any, quantization_params: Any, out_dtype: Any, layout: str = "TN", m_splits: Any = None,
        use_split_accumulator: bool = False,
    ) -> None:  # fmt: skip
        assert quantization_params == [None] * len(A)
        _multiply(A, B, out, layout, m_splits)

    return with_params


class Quantizer:
    def __init__(
        self, fp8_dtype: Any, *, rowwise: bool, columnwise: bool, force_pow_2_scales: bool, block_scaling_dim: int
    ) -> None:
        self.block_scaling_dim = block_scaling_dim


class QuantizedTensor(Tensor):
    """A bfloat16 tensor to look at; its data are attributes."""

    def __new__(cls, shape: Any, dtype: torch.dtype, *, device: Any = None, **values: Any) -> Any:
        tensor = Tensor._make_subclass(cls, torch.zeros(shape, dtype=dtype))
        for name, value in values.items():
            setattr(tensor, f"_{name}", value)
        if "fp8_scale_inv" in values:
            tensor._scale_inv = values["fp8_scale_inv"]  # type: ignore[attr-defined]
        return tensor


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Makes `version` the installed release until the test ends."""
    major, minor = (int(part) for part in version.split(".")[:2])
    release = (major, minor)
    block_fields: tuple[str, ...] = (
        *("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"),
        *("fp8_dtype", "quantizer", "is_2D_scaled"),
    )
    tensor_fields: tuple[str, ...] = ("data", "fp8_scale_inv", "fp8_dtype", "quantizer")
    if (2, 5) <= release < (2, 12):
        block_fields += ("data_format",)
    if release >= (2, 14):
        block_fields += ("fake_dtype",)
        tensor_fields += ("fake_dtype",)

    def storage(name: str, fields: tuple[str, ...]) -> type:
        parameters = ", ".join(fields)
        names: dict[str, Any] = {}
        exec(f"def __new__(cls, *, {parameters}): return object.__new__(cls)", names)  # noqa: S102
        return type(name, (Record,), {"allowed": fields, "__new__": names["__new__"]})

    moved = release >= (2, 9)
    folder, suffix = ("storage", "Storage") if moved else ("_internal", "Base")
    ending = "storage" if moved else "base"
    home = "transformer_engine.pytorch"
    two = release >= (2, 17)
    modules: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        home: {"DType": DType} if two else {},
        f"{home}.cpp_extensions": {"general_grouped_gemm": _gemm_of(release)},
        f"{home}.module": {},
        f"{home}.module.base": {"get_multi_stream_cublas_workspace": lambda: ["workspace"]},
        f"{home}.tensor": {"QuantizedTensor": QuantizedTensor},
        f"{home}.tensor.{folder}": {},
        f"{home}.tensor.{folder}.float8_blockwise_tensor_{ending}": {
            f"Float8BlockwiseQTensor{suffix}": storage("Block", block_fields)
        },
        f"{home}.tensor.{folder}.float8_tensor_{ending}": {f"Float8Tensor{suffix}": storage("Whole", tensor_fields)},
        f"{home}.tensor.float8_blockwise_tensor": {
            "Float8BlockwiseQTensor": QuantizedTensor,
            "Float8BlockQuantizer": Quantizer,
        },
        f"{home}.tensor.float8_tensor": {"Float8Tensor": QuantizedTensor},
        "transformer_engine_torch": {
            "DType": ExtensionDType if two else DType,
            "Float8BlockScaleTensorFormat": Format,
        },
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "transformer-engine" else real(name)
    )
    monkeypatch.setattr(transformer_engine, "load", _LOAD)
