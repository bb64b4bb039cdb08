"""The kernels of csrc beside their references: the FP8 cast bit for bit, the layout count number for number."""

from dataclasses import dataclass

import pytest
import torch

from moe_ep import _native
from moe_ep.fp8 import dequantize_1x128, quantize_1x128

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and PyTorch finds none"),
    pytest.mark.skipif(_native.load() is None, reason="needs moe_ep._C, which this install was made without"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BOTH_SCALE_MODES = pytest.mark.parametrize("power_of_two", [False, True])


def random_rows(num_tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows on the CPU whose blocks differ in size by up to 2^24."""
    generator = torch.Generator().manual_seed(num_tokens * 10_000 + hidden)
    exponents = torch.randint(-12, 12, (num_tokens, hidden), generator=generator)
    return (torch.randn(num_tokens, hidden, generator=generator) * torch.exp2(exponents.float())).to(dtype)


def assert_kernel_equals_reference(
    x_TH: torch.Tensor, power_of_two: bool, x_on_gpu: torch.Tensor | None = None, num_sms: int | None = None
) -> None:
    x_on_gpu = x_TH.cuda() if x_on_gpu is None else x_on_gpu
    q_TH, scales_TB = quantize_1x128(x_on_gpu, power_of_two, num_sms=num_sms)
    expected_q, expected_scales = quantize_1x128(x_TH, power_of_two)
    assert q_TH.is_cuda
    torch.testing.assert_close(scales_TB.cpu(), expected_scales, rtol=0.0, atol=0.0)
    torch.testing.assert_close(q_TH.cpu().view(torch.uint8), expected_q.view(torch.uint8), rtol=0, atol=0)


@BOTH_SCALE_MODES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 8, 127, 128, 130, 136, 2176, 7168])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_the_cast_kernel_gives_the_bits_of_the_reference(
    num_tokens: int, hidden: int, dtype: torch.dtype, power_of_two: bool
) -> None:
    # case F05 (sizes)
    assert_kernel_equals_reference(random_rows(num_tokens, hidden, dtype), power_of_two)


@BOTH_SCALE_MODES
@pytest.mark.parametrize("hidden", [640, 643])
def test_zero_tiny_huge_and_bad_elements_cast_as_in_the_reference(hidden: int, power_of_two: bool) -> None:
    # case F01, in the wide (640) and the narrow (643) accesses of the kernel
    x_TH = random_rows(4, hidden, torch.float32)
    x_TH[0, :128] = 0.0
    x_TH[0, 128:256] = 1e-30
    x_TH[0, 256:384] = -1e-40
    x_TH[1, :128] = torch.finfo(torch.float32).max
    x_TH[1, 300] = float("nan")
    x_TH[2, 5] = float("inf")
    x_TH[2, 6] = -float("inf")
    x_TH[3, 128:256] = float("nan")
    assert_kernel_equals_reference(x_TH, power_of_two)


@BOTH_SCALE_MODES
def test_every_float32_exponent_and_every_e4m3_tie_casts_as_in_the_reference(power_of_two: bool) -> None:
    # case F01: one row for each float32 exponent, from zero and the subnormal numbers on
    bits_TH = (torch.arange(255, dtype=torch.int64) << 23).unsqueeze(1) + torch.arange(128) * ((1 << 16) + 1)
    assert_kernel_equals_reference(bits_TH.to(torch.int32).view(torch.float32), power_of_two)
    steps = torch.arange(1, 129).float() * 3.5  # multiples of half an e4m3 step up to 448
    assert_kernel_equals_reference(
        steps.repeat(16, 1) * torch.exp2(torch.arange(16).float()).unsqueeze(1), power_of_two
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_any_address_and_stride_cast_as_their_copy(dtype: torch.dtype) -> None:
    # case I06 for rows
    rows = random_rows(9, 2 * 256, dtype)
    flat = random_rows(1, 5 * 256 + 1, dtype)[0]
    shifted = flat.cuda()[1:].view(5, 256)
    assert shifted.data_ptr() % 16 != 0
    assert_kernel_equals_reference(flat[1:].view(5, 256), False, x_on_gpu=shifted)
    assert_kernel_equals_reference(rows[:, ::2], False, x_on_gpu=rows.cuda()[:, ::2])
    assert_kernel_equals_reference(rows.t(), False, x_on_gpu=rows.cuda().t())


@pytest.mark.parametrize("num_sms", [1, 3, 24])
def test_the_sm_budget_changes_no_bit(num_sms: int) -> None:
    assert_kernel_equals_reference(random_rows(500, 2176, torch.bfloat16), False, num_sms=num_sms)


def test_the_cast_runs_on_the_current_stream() -> None:
    x_TH = random_rows(64, 1024, torch.bfloat16)
    on_gpu = torch.zeros_like(x_TH, device="cuda")
    source = x_TH.cuda()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # the copy below comes late: a cast on another stream would see zeros
        on_gpu.copy_(source)
        assert_kernel_equals_reference(x_TH, False, x_on_gpu=on_gpu)


def test_rows_past_2_31_elements_are_addressed_right() -> None:
    hidden = 7168
    num_tokens = 2**31 // hidden + 3
    needed_bytes = 4 * num_tokens * hidden
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes / 2**30:.0f} GiB of free GPU memory")
    last_rows = random_rows(3, hidden, torch.bfloat16)
    x_TH = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16, device="cuda")
    x_TH[-3:] = last_rows.cuda()
    q_TH, scales_TB = quantize_1x128(x_TH)
    expected_q, expected_scales = quantize_1x128(last_rows)
    assert torch.equal(q_TH[-3:].cpu().view(torch.uint8), expected_q.view(torch.uint8))
    assert torch.equal(scales_TB[-3:].cpu(), expected_scales)
    assert (scales_TB[:-3] == 2.0**-126).all()


def test_the_round_trip_on_the_gpu_is_exact_for_constant_blocks() -> None:
    # case F05 with the numbers of F04
    exponents = (2 * torch.arange(4).unsqueeze(1) + torch.arange(2176) // 128) % 40
    x_TH = (448.0 * torch.exp2(exponents.float())).cuda()
    q_TH, scales_TB = quantize_1x128(x_TH)
    assert torch.equal(dequantize_1x128(q_TH, scales_TB, torch.float32), x_TH)


@dataclass(frozen=True)
class Layout:
    """The outputs of the layout count, as lists."""

    tokens_per_expert: list[int]
    tokens_per_rank: list[int]
    is_token_in_rank: list[list[bool]]
    bad_id: list[int]


def layout_reference(topk_idx_TK: list[list[int]], rank_of_expert: list[int], num_ranks: int) -> Layout:
    """The same by plain loops."""
    tokens_per_expert = [0] * len(rank_of_expert)
    is_token_in_rank = [[False] * num_ranks for _ in topk_idx_TK]
    bad_id = [-1, -1, -1]
    for token, ids in enumerate(topk_idx_TK):
        for slot, expert in enumerate(ids):
            if 0 <= expert < len(rank_of_expert):
                tokens_per_expert[expert] += 1
                is_token_in_rank[token][rank_of_expert[expert]] = True
            elif expert != -1 and bad_id[0] == -1:
                bad_id = [token, slot, expert]
    tokens_per_rank = [sum(row[rank] for row in is_token_in_rank) for rank in range(num_ranks)]
    return Layout(tokens_per_expert, tokens_per_rank, is_token_in_rank, bad_id)


def layout_by_kernel(topk_idx_TK: torch.Tensor, rank_of_expert: list[int], num_ranks: int, num_sms: int = 16) -> Layout:
    """Run the kernel over outputs that hold rubbish before."""
    num_tokens, num_topk = topk_idx_TK.shape
    num_experts = len(rank_of_expert)
    idx = topk_idx_TK.cuda()
    table = torch.tensor(rank_of_expert, dtype=torch.int32, device="cuda")
    tokens_per_expert = torch.full((num_experts,), -999999, dtype=torch.int32, device="cuda")
    tokens_per_rank = torch.full((num_ranks,), -999999, dtype=torch.int32, device="cuda")
    is_token_in_rank = torch.ones((num_tokens, num_ranks), dtype=torch.bool, device="cuda")
    bad_id = torch.full((3,), 7, dtype=torch.int64, device="cuda")
    _native.require().layout_count(
        topk_idx=idx.data_ptr(),
        idx_bytes=idx.element_size(),
        rank_of_expert=table.data_ptr(),
        tokens_per_expert=tokens_per_expert.data_ptr(),
        tokens_per_rank=tokens_per_rank.data_ptr(),
        is_token_in_rank=is_token_in_rank.data_ptr(),
        bad_id=bad_id.data_ptr(),
        num_tokens=num_tokens,
        num_topk=num_topk,
        num_experts=num_experts,
        num_ranks=num_ranks,
        num_sms=num_sms,
        stream=torch.cuda.current_stream().cuda_stream,
    )
    return Layout(tokens_per_expert.tolist(), tokens_per_rank.tolist(), is_token_in_rank.tolist(), bad_id.tolist())


def even_placement(num_experts: int, num_ranks: int) -> list[int]:
    """Contiguous groups of experts, as equal as they can be."""
    return [expert * num_ranks // num_experts for expert in range(num_experts)]


def test_the_example_of_the_header_is_true() -> None:
    assert layout_by_kernel(torch.tensor([[0, 1], [1, 2], [3, 3], [-1, 0]]), [0, 0, 1, 1], 2) == Layout(
        [2, 2, 1, 2], [3, 2], [[True, False], [True, True], [False, True], [True, False]], [-1, -1, -1]
    )


@pytest.mark.parametrize("num_sms", [1, 24])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_experts", "num_ranks"),
    [(0, 2, 4, 2), (1, 1, 1, 1), (33, 3, 5, 3), (256, 6, 64, 8), (4096, 8, 256, 2), (1000, 64, 100, 7)],
)
def test_counts_equal_the_plain_loop(
    num_tokens: int, num_topk: int, num_experts: int, num_ranks: int, dtype: torch.dtype, num_sms: int
) -> None:
    # case I01 (-1 in any slot), I03 (int32 and int64); duplicates and uneven placement are in the draw
    generator = torch.Generator().manual_seed(num_tokens)
    idx_TK = torch.randint(-1, num_experts, (num_tokens, num_topk), generator=generator)
    placement = even_placement(num_experts, num_ranks)
    expected = layout_reference(idx_TK.tolist(), placement, num_ranks)
    assert layout_by_kernel(idx_TK.to(dtype), placement, num_ranks, num_sms) == expected


def test_a_token_counts_once_per_rank_and_each_slot_once_per_expert() -> None:
    # case I07
    layout = layout_by_kernel(torch.tensor([[4, 5, 6, 7], [0, 4, 5, 1]]), even_placement(8, 2), 2)
    assert layout.tokens_per_expert == [1, 1, 0, 0, 2, 2, 1, 1]
    assert layout.tokens_per_rank == [1, 2]


def test_all_tokens_to_one_expert_and_none_at_all_are_ordinary() -> None:
    # case I02 (a rank whose tokens all have no expert)
    to_one = layout_by_kernel(torch.full((5000, 2), 3), even_placement(4, 2), 2)
    assert (to_one.tokens_per_expert, to_one.tokens_per_rank) == ([0, 0, 0, 10000], [0, 5000])
    to_none = layout_by_kernel(torch.full((70, 2), -1), even_placement(4, 2), 2)
    assert (to_none.tokens_per_expert, to_none.tokens_per_rank) == ([0, 0, 0, 0], [0, 0])
    assert not any(any(row) for row in to_none.is_token_in_rank)


@pytest.mark.parametrize("row", [[8, 0], [-2, 1], [4294967296, 1], [4294967299, 1], [2**63 - 1, -(2**63)]])
def test_an_id_out_of_range_is_recorded_and_counts_nowhere(row: list[int]) -> None:
    # case I04
    idx_TK = torch.tensor([[0, 7], row, [8, 8]])
    layout = layout_by_kernel(idx_TK, even_placement(8, 2), 2)
    assert layout == layout_reference(idx_TK.tolist(), even_placement(8, 2), 2)
    assert layout.bad_id == [1, 0, row[0]]
    # The context lives on.
    assert layout_by_kernel(torch.tensor([[0, 7]]), even_placement(8, 2), 2).bad_id == [-1, -1, -1]


def test_the_first_bad_id_in_reading_order_is_the_one_reported() -> None:
    # case I04, over many blocks of threads
    idx_TK = torch.zeros(20_000, 4, dtype=torch.int64)
    idx_TK[7_000:, 1] = torch.arange(13_000) + 100
    idx_TK[7_001:, 0] = -5
    for _ in range(20):
        assert layout_by_kernel(idx_TK, even_placement(8, 2), 2).bad_id == [7_000, 1, 100]
