"""The signatures of the FP8 casts of the experts in `moe_ep._C`. See `moe_ep._native.loader`."""

from typing import Protocol


class Fp8Products(Protocol):
    """Products of FP8 matrices on one device, through cuBLASLt; csrc/fp8/products.h."""

    def multiply(
        self,
        *,
        sizes: list[int],
        pointers: list[int],
        a_scaling: str,
        a_is_e5m2: bool,
        b_scaling: str,
        b_is_e5m2: bool,
        out_dtype: str,
        stream: int,
    ) -> None:
        """sizes: m, n, k of every product; pointers: a, its scales, b, its scales, out."""


class MakeFp8Products(Protocol):
    """The class `Fp8Products` of the extension."""

    num_streams: int

    def __call__(self, *, workspaces: list[int], workspace_bytes: int) -> Fp8Products:
        """On the current device; one workspace a stream, kept alive by the caller."""


class Fp8Kernels(Protocol):
    """What `moe_ep.fp8.blocks` and `moe_ep.layers.fp8.cublas` call. Pointers and streams are integers; 0 means null."""

    Fp8Products: MakeFp8Products

    def fp8_products_obstacle(self) -> str:
        """Why products cannot be had, as the middle of a sentence; empty if they can."""

    def fp8_cast_tiles(
        self,
        *,
        source: str,
        dtype: str,
        x: int,
        x_scales: int,
        grads: int,
        row_weights: int,
        tiles: int,
        num_tiles: int,
        width: int,
        rows: int,
        row_scales: int,
        columns: int,
        column_scales: int,
        weight_sums: int,
        one_scale: bool,
        power_of_two: bool,
        stream: int,
    ) -> None:
        """Cast rows grouped by expert, their transpose, or both; csrc/fp8/tiles.h."""

    def fp8_pack_scales(
        self, *, scales: int, tiles: int, num_tiles: int, num_blocks: int, packed: int, stream: int
    ) -> None:
        """Row-major scales to the GEMM's layout; csrc/fp8/tiles.h."""
