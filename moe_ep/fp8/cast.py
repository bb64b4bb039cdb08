"""FP8 rows: e4m3 with one float32 scale per 1x128 block (128 neighbouring elements of a row).

T tokens, H hidden, B = ceil(H / 128) blocks of a row, C = 128 elements of a block; where 128 does not divide H, the
last block is shorter.

The arithmetic is fixed, so that this reference and csrc/fp8/cast.cu give the same bits. All in float32, each step
rounded to nearest, ties to even:

    amax    = max |x| over the finite elements of the block, 0 if there are none
    scale   = max(amax / 448, 2^-126)              448 is the largest e4m3 number; a true division
    scale   = the next power of two, rounded up    (only with power_of_two)
    inverse = 1 / scale                            one division a block
    q       = e4m3(x * inverse)                    a multiplication an element, not a division

The floor 2^-126, the smallest normal number, is what keeps a block of zeros or of tiny values harmless: the scale is
positive and its reciprocal (2^126) finite, so neither 0/0 nor an infinite reciprocal can arise here or in a consumer.
x * inverse passes 448 by at most a few units in the last place, which rounds to 448; the e4m3 NaN begins above 464.
A NaN or an infinity becomes the e4m3 NaN (code 0x7F) and leaves the rest of its block as if it were not there.

Error of the round trip: |dequantised - x| <= max(|x| / 16, scale / 1024), since e4m3 keeps 4 significant bits and its
smallest step is 2^-9 (apart from float32 rounding, relative 1e-6). This holds up to |x| = 2^127; above, rounding up can
pass the largest float32 and dequantise to infinity.
"""

import torch

from moe_ep import _native

BLOCK_ELEMS = 128
MAX_E4M3 = 448.0
# The scale 1 in the dtypes in which scales travel: float32, and four UE8M0 exponents (byte 127) in an int32. Padding
# rows have it, so that whoever looks at a whole array of scales finds finite positive ones.
UNIT_SCALE = {torch.float32: 1.0, torch.int32: 0x7F7F7F7F}

_NAN_E4M3 = 0x7F
MIN_SCALE = 2.0**-126
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantize_1x128(
    x_TH: torch.Tensor, power_of_two: bool = False, *, num_sms: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast rows to FP8, one scale per 1x128 block. Not differentiable: the results are cut off from the graph of x.

    On CUDA with the extension one kernel does it, on the current stream; everywhere else the formula of the module's
    docstring in PyTorch, with the same bits.

    Args:
        x_TH: [T, H] bfloat16, float16 or float32, any strides; T >= 0, H >= 1.
        power_of_two: round every scale up to a power of two, as 8-bit exponent scales need.
        num_sms: the most SMs that the kernel may use; None = all. Only the CUDA kernel looks at it.

    Returns:
        x_fp8_TH, [T, H] float8_e4m3fn, contiguous, and scales_TB, [T, B] float32, contiguous, B = ceil(H / 128);
        every scale is finite and at least 2^-126, and x is about x_fp8 * scale.

    Raises:
        ValueError: x has another dtype, is not two-dimensional, or has no columns.
    """
    if x_TH.dim() != 2 or x_TH.shape[1] < 1:
        raise ValueError(f"x has shape {list(x_TH.shape)}, but [T, H] with H >= 1 is needed: reshape x to rows.")
    if x_TH.dtype not in _INPUT_DTYPES:
        raise ValueError(
            f"x has dtype {x_TH.dtype}, but bfloat16, float16 and float32 can be cast to FP8: convert x before."
        )
    if x_TH.is_cuda and (kernels := _native.load()) is not None:
        return _quantize_with_kernel(kernels, x_TH.detach(), power_of_two, num_sms)
    return _quantize_reference(x_TH.detach(), power_of_two)


def dequantize_1x128(
    x_fp8_TH: torch.Tensor, scales_TB: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Multiply every element by the scale of its 1x128 block, in float32, and round once to `dtype`.

    Args:
        x_fp8_TH: [T, H] float8_e4m3fn, any strides.
        scales_TB: [T, ceil(H / 128)] float32, any strides, padded rows included: it is read through its strides.
        dtype: the floating dtype of the result.

    Returns:
        [T, H] in `dtype`, contiguous.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    if x_fp8_TH.dim() != 2 or x_fp8_TH.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"x_fp8 is {list(x_fp8_TH.shape)} {x_fp8_TH.dtype}, but [T, H] float8_e4m3fn is needed: "
            "give the first result of quantize_1x128."
        )
    num_tokens, hidden = x_fp8_TH.shape
    expected = (num_tokens, num_blocks(hidden))
    if tuple(scales_TB.shape) != expected or scales_TB.dtype != torch.float32:
        raise ValueError(
            f"scales is {list(scales_TB.shape)} {scales_TB.dtype}, but {list(expected)} float32 is needed for x_fp8 "
            f"{list(x_fp8_TH.shape)}: give the scales that quantize_1x128 returned with it."
        )
    values_TH = x_fp8_TH.float().contiguous()
    if hidden % BLOCK_ELEMS == 0:  # in place, so that a float32 copy of the rows is all that is made
        values_TH.view(*expected, BLOCK_ELEMS).mul_(scales_TB.unsqueeze(2))
    else:
        values_TH.mul_(scales_TB.repeat_interleave(BLOCK_ELEMS, dim=1)[:, :hidden])
    return values_TH.to(dtype)


def num_blocks(hidden: int) -> int:
    """The number of 1x128 blocks, and so of scales, in a row of `hidden` elements."""
    return -(-hidden // BLOCK_ELEMS)


def up_to_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Positive normal float32 scales, each rounded up to a power of two."""
    # Adding all mantissa bits carries into the exponent unless the mantissa is zero already.
    return ((scales.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def _quantize_reference(x_TH: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, hidden = x_TH.shape
    blocks = num_blocks(hidden)
    padding = blocks * BLOCK_ELEMS - hidden
    x_TBC = torch.nn.functional.pad(x_TH.float(), (0, padding)).view(num_tokens, blocks, BLOCK_ELEMS)
    is_finite = x_TBC.isfinite()
    amax_TB = torch.where(is_finite, x_TBC.abs(), 0.0).amax(dim=2)
    # Divided by a tensor: by a Python number, PyTorch on CUDA multiplies with the rounded reciprocal instead.
    scales_TB = torch.div(amax_TB, torch.full_like(amax_TB, MAX_E4M3)).clamp(min=MIN_SCALE)
    if power_of_two:
        scales_TB = up_to_power_of_two(scales_TB)
    scaled_TBC = x_TBC * scales_TB.reciprocal().unsqueeze(2)
    codes_TBC = scaled_TBC.to(torch.float8_e4m3fn).view(torch.uint8)
    codes_TBC = torch.where(is_finite, codes_TBC, _NAN_E4M3)
    codes_TH = codes_TBC.view(num_tokens, blocks * BLOCK_ELEMS)[:, :hidden].contiguous()
    return codes_TH.view(torch.float8_e4m3fn), scales_TB


def _quantize_with_kernel(
    kernels: _native.NativeKernels, x_TH: torch.Tensor, power_of_two: bool, num_sms: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    x_TH = x_TH.contiguous()
    num_tokens, hidden = x_TH.shape
    x_fp8_TH = torch.empty_like(x_TH, dtype=torch.float8_e4m3fn)
    scales_TB = x_TH.new_empty((num_tokens, num_blocks(hidden)), dtype=torch.float32)
    with torch.cuda.device(x_TH.device):
        if num_sms is None:
            num_sms = torch.cuda.get_device_properties(x_TH.device).multi_processor_count
        kernels.fp8_cast_1x128(
            x=x_TH.data_ptr(),
            dtype=str(x_TH.dtype).removeprefix("torch."),
            q=x_fp8_TH.data_ptr(),
            scales=scales_TB.data_ptr(),
            num_tokens=num_tokens,
            hidden=hidden,
            power_of_two=power_of_two,
            num_sms=num_sms,
            stream=torch.cuda.current_stream().cuda_stream,
        )
    return x_fp8_TH, scales_TB
