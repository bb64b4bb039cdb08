"""FP8: the cast of rows that travel (`cast`), and the matrices that experts multiply (`matrix`, `blocks`, `rows`)."""

from moe_ep.fp8.cast import (
    BLOCK_ELEMS,
    MAX_E4M3,
    MIN_SCALE,
    UNIT_SCALE,
    dequantize_1x128,
    num_blocks,
    quantize_1x128,
    up_to_power_of_two,
)

__all__ = [
    "BLOCK_ELEMS",
    "MAX_E4M3",
    "MIN_SCALE",
    "UNIT_SCALE",
    "dequantize_1x128",
    "num_blocks",
    "quantize_1x128",
    "up_to_power_of_two",
]
