"""The signatures of the FP8 casts of the experts in `moe_ep._C`. See `moe_ep._native`."""

from typing import Protocol


class Fp8Kernels(Protocol):
    """What `moe_ep.fp8_blocks` calls. Pointers and streams are integers; 0 where a header says null."""

    def fp8_cast_tiles(
        self,
        *,
        source: str,
        dtype: str,
        x: int,
        x_scales: int,
        grads: int,
        tiles: int,
        num_tiles: int,
        width: int,
        rows: int,
        row_scales: int,
        columns: int,
        column_scales: int,
        one_scale: bool,
        power_of_two: bool,
        stream: int,
    ) -> None:
        """Cast rows grouped by expert, their transpose, or both; csrc/fp8_tiles.h."""

    def fp8_pack_scales(
        self, *, scales: int, tiles: int, num_tiles: int, num_blocks: int, packed: int, stream: int
    ) -> None:
        """Row-major scales to the GEMM's layout; csrc/fp8_tiles.h."""
