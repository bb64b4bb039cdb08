"""The FP8 casts of the extension, as far as they need no GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from moe_ep import _native

pytestmark = pytest.mark.skipif(_native.load() is None, reason="needs moe_ep._C, which this install was made without")

ARGUMENTS: dict[str, Any] = {
    **{"source": "rows", "dtype": "bfloat16", "num_tiles": 1, "width": 64, "one_scale": False, "power_of_two": True},
    **dict.fromkeys(["x", "x_scales", "grads", "row_weights", "tiles", "stream"], 0),
    **dict.fromkeys(["rows", "row_scales", "columns", "column_scales", "weight_sums"], 0),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 20}, "the width is 20, but a multiple of 16 is needed"),
        ({"num_tiles": 70_000}, "there are 70000 tiles, but 0 to 65535 are possible"),
        ({"source": "swiglu_grad", "width": 48}, "the width is 48, but halves that are multiples of 16 are needed"),
        ({"dtype": "float16"}, "rows are float16, but bfloat16 and float32 are served"),
        ({"source": "columns"}, "source is columns, but rows, swiglu, swiglu_grad and fp8 are supported"),
        ({"source": "swiglu", "one_scale": True}, "one scale a tile is for rows as they are"),
        ({"source": "swiglu", "weight_sums": 4}, "sums for the weights come with SwiGLU's gradient"),
    ],
)
def test_impossible_arguments_are_refused_before_any_launch(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        _native.require().fp8_cast_tiles(**(ARGUMENTS | change))


def test_no_tiles_launch_nothing() -> None:
    _native.require().fp8_cast_tiles(**(ARGUMENTS | {"num_tiles": 0}))
    _native.require().fp8_pack_scales(scales=0, tiles=0, num_tiles=0, num_blocks=1, packed=0, stream=0)


def test_products_without_library_or_workspaces_are_refused_in_a_sentence() -> None:
    kernels = _native.require()
    expected = kernels.fp8_products_obstacle() or "there are 1 workspaces, but 4 are needed"
    with pytest.raises(RuntimeError, match=re.escape(f"fp8_products: {expected}")):
        kernels.Fp8Products(workspaces=[0], workspace_bytes=1)
