"""FP8 rows and the padding that FP8 GEMMs want, without a GPU. The cases F02 and F04 to F08."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moe_ep
from moe_ep.config import MoEConfig, RouterConfig
from moe_ep.fp8 import dequantize_1x128, quantize_1x128
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import Case, Setup, leave_nans_behind, open_buffer, run_case, scale_moe, setups, share

ROWS = (0, 1, 15, 16, 17, 44)  # of each expert, over all sources
PADDED = {
    16: [0, 16, 16, 16, 32, 48],
    32: [0, 32, 32, 32, 32, 64],
    128: [0, 128, 128, 128, 128, 128],  # an expert without rows takes no block
}
WORLDS = (1, 2, 3)


def rows_case(hidden: int = 8) -> Case:
    """One expert a token, the tokens in a mixed order, so that every source has rows of every expert."""
    g = torch.Generator().manual_seed(2)
    experts = torch.repeat_interleave(torch.arange(6), torch.tensor(ROWS))
    total = len(experts)
    return Case(
        x=(torch.rand(total, hidden, generator=g) + 0.5).bfloat16(),
        idx=experts[torch.randperm(total, generator=g)].unsqueeze(1),
        weights=torch.rand(total, 1, generator=g) + 0.1,
        dy=(torch.rand(total, generator=g) + 0.5).bfloat16(),
        num_tokens=(total,),
        num_experts=6,
        scale=torch.arange(1.0, 7.0),
        bias=None,
    )


# -- F02: padding to what the GEMM wants ------------------------------------------------------------------------------


def padded_rows(group: dist.ProcessGroup, setup: Setup) -> tuple[list[int], list[int]]:
    """Counts with and without padding; the padding rows are looked at here."""
    leave_nans_behind()
    with open_buffer(group, setup.backend) as buffer:
        own = share(rows_case(), group, setup)
        _, out = scale_moe(buffer, own, setup)
    assert out.tokens_per_expert is not None
    assert out.real_tokens_per_expert is not None
    assert out.topk_weights is not None
    assert out.expert_counts.tolist() == out.real_tokens_per_expert
    assert out.expert_offsets.diff().tolist() == out.tokens_per_expert
    assert len(out.x) == sum(out.tokens_per_expert)
    first = 0
    for local, (num, real) in enumerate(zip(out.tokens_per_expert, out.real_tokens_per_expert, strict=True)):
        padding = slice(first + real, first + num)
        assert not bool(out.x[padding].any())
        assert not bool(out.topk_weights[padding].any())
        assert bool((out.topk_idx[padding] == -1).all())
        assert bool((out.topk_idx[first : first + real] == local).all())
        first += num
    return out.tokens_per_expert, out.real_tokens_per_expert


# case F02
@pytest.mark.parametrize("alignment", PADDED)
@setups(*WORLDS, layouts=["expert_major"])
def test_rows_of_an_expert_are_padded_and_the_real_counts_reported(ranks: Pools, setup: Setup, alignment: int) -> None:
    by_rank = ranks.run(padded_rows, setup.world, replace(setup, alignment=alignment))
    assert [count for padded, _ in by_rank for count in padded] == PADDED[alignment]
    assert [count for _, real in by_rank for count in real] == list(ROWS)


# case F02
@pytest.mark.parametrize("alignment", PADDED)
@setups(*WORLDS, layouts=["expert_major"])
def test_padding_adds_nothing_to_a_value_or_a_gradient(ranks: Pools, setup: Setup, alignment: int) -> None:
    case = rows_case()
    plain = run_case(ranks, case, setup)
    padded = run_case(ranks, case, replace(setup, alignment=alignment))
    for name in ("y", "dx", "dw"):
        assert_same_bits(getattr(padded, name), getattr(plain, name), name)
    assert padded.ds is not None
    assert plain.ds is not None
    torch.testing.assert_close(padded.ds, plain.ds, rtol=1e-6, atol=0)  # one sum over more terms, of which some are 0


# -- F04, F05: rows whose FP8 bytes are alike and whose scales are not ------------------------------------------------


def blocks_of(rows: int, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Block b of row i is 448 * 2^(2i + b) with the scale 2^(2i + b): exact, and every byte the same."""
    powers = 2.0 ** (2 * torch.arange(rows).unsqueeze(1) + torch.arange(num_blocks))
    x = (448 * powers).repeat_interleave(128, dim=1)
    codes, scales = quantize_1x128(x)
    assert torch.equal(scales, powers)
    assert len(codes.view(torch.uint8).unique()) == 1
    return codes, scales


def _strided(scales: Tensor) -> Tensor:
    """Rows with a gap behind them, as aligned rows of 17 scales have."""
    wide = torch.full((scales.shape[0], scales.shape[1] + 3), float("nan"))
    wide[:, : scales.shape[1]] = scales
    return wide[:, : scales.shape[1]]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row-major": lambda scales: scales,
    "column-major": lambda scales: scales.t().contiguous().t(),
    "with gaps": _strided,
}


def normal_dispatch(buffer: moe_ep.Buffer, x: Any, idx: Tensor, **options: Any) -> Any:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
    return buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=torch.ones(idx.shape),
        **options,
    )


def crossing_scales(group: dist.ProcessGroup, rows: int, num_blocks: int) -> None:
    """Even rows go to the last rank, odd ones to the first; both ranks send the same."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    codes, scales = blocks_of(rows, num_blocks)
    idx = torch.where(torch.arange(rows) % 2 == 0, 3, 0).unsqueeze(1)
    mine = [i for i in range(rows) if world == 1 or (i % 2 == 0) == (rank == 1)] * world
    expected = (448 * scales).repeat_interleave(128, dim=1)[mine]
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        for name, layout in LAYOUTS.items():
            (recv, recv_scales), *_ = normal_dispatch(buffer, (codes, layout(scales)), idx)
            assert_same_bits(recv_scales.contiguous(), scales[mine], f"scales given {name}")
            assert_same_bits(dequantize_1x128(recv, recv_scales, torch.float32), expected, f"rows, scales {name}")


# case F04, F05
@pytest.mark.parametrize(("rows", "num_blocks"), [(1, 2), (3, 2), (5, 2), (4, 17)])
@pytest.mark.parametrize("world", [1, 2])
def test_scales_travel_with_their_rows_whatever_their_strides(
    ranks: Pools, world: int, rows: int, num_blocks: int
) -> None:
    ranks.run(crossing_scales, world, rows, num_blocks)


# -- F06: scales of padding -------------------------------------------------------------------------------------------


def whole_arrays(group: dist.ProcessGroup) -> None:
    """Every scale of every array that a call returns, padding included."""
    rank = dist.get_rank(group)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(5 + rank, 512, generator=g).bfloat16()
    idx = torch.randint(0, 4, (len(x), 1), generator=g)
    codes, scales = quantize_1x128(x, power_of_two=True)
    packed = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    leave_nans_behind()
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        for given in (scales, packed):
            recv, *_, handle, _ = normal_dispatch(buffer, (codes, given), idx, num_worst_tokens=32)
            _check_whole(*recv, handle.num_compact_rows)
            cached, *_ = buffer.dispatch((codes, given), handle=handle)
            _check_whole(*cached, handle.num_compact_rows)
        for use_ue8m0 in (False, True):
            for with_hook in (False, True):
                recv, count, *_, hook = buffer.low_latency_dispatch(
                    x, idx, 8, 4, round_scale=True, use_ue8m0=use_ue8m0, return_recv_hook=with_hook
                )
                _check_scales(recv[1])  # before the hook too
                if hook is not None:
                    hook()
                for local, real in enumerate(count.tolist()):
                    _check_whole(recv[0][local], recv[1][local], real)


def _check_whole(rows: Tensor, scales: Tensor, real: int) -> None:
    assert real < len(rows)
    assert not bool(rows[real:].view(torch.uint8).any())
    _check_scales(scales)
    unit = torch.tensor(1.0).view(torch.int32) >> 23
    assert bool((_exponents(scales[real:]) == int(unit)).all())


def _check_scales(scales: Tensor) -> None:
    exponents = _exponents(scales)
    assert int(exponents.min()) > 0
    assert int(exponents.max()) < 255


def _exponents(scales: Tensor) -> Tensor:
    """The exponent byte of each scale, of a power of two."""
    if scales.dtype == torch.int32:
        return scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    bits = scales.clone(memory_format=torch.contiguous_format).view(torch.int32)
    assert not bool((bits & 0x807FFFFF).any())
    return bits >> 23


# case F06
@pytest.mark.parametrize("world", [1, 2])
def test_every_scale_of_a_returned_array_is_finite_and_positive(ranks: Pools, world: int) -> None:
    ranks.run(whole_arrays, world)


# -- F08: gradients ---------------------------------------------------------------------------------------------------


def refused_gradients(group: dist.ProcessGroup) -> None:
    """Only rank 1 gives FP8; every rank raises, and the buffer goes on."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    wrong = rank == world - 1
    x = torch.randn(3, 256, requires_grad=True)
    codes = x.to(torch.float8_e4m3fn)
    assert codes.requires_grad
    idx = torch.zeros(3, 1, dtype=torch.int64)
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        out = moe_ep.dispatch(buffer, x, idx, num_experts=world)
        with pytest.raises(TypeError, match="x is torch.float8_e4m3fn; .* FP8 rows travel without a gradient"):
            moe_ep.dispatch(buffer, codes if wrong else x, idx, num_experts=world)
        with pytest.raises(TypeError, match="x is tuple; give a torch.Tensor"):
            moe_ep.dispatch(buffer, quantize_1x128(x) if wrong else x, idx, num_experts=world)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="rows is torch.float8_e4m3fn; .* FP8 rows travel without a gradient"):
            moe_ep.combine(buffer, out.x.to(torch.float8_e4m3fn) if wrong else out.x, out.handle)
        moe_ep.combine(buffer, out.x, out.handle).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))  # type: ignore[arg-type]


# case F08
@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_through_fp8_rows_is_refused_and_not_lost(ranks: Pools, world: int) -> None:
    """FP8 tensors themselves have no gradient: the functions say so, on every rank, and what does travel with one."""
    ranks.run(refused_gradients, world)


# case F08
def test_what_the_low_level_calls_return_is_cut_off_from_the_graph() -> None:
    """They are not differentiable, and a backward through them raises PyTorch's own error."""
    x = torch.randn(3, 256).bfloat16().requires_grad_()
    idx = torch.zeros(3, 1, dtype=torch.int64)
    with moe_ep.Buffer() as buffer:
        (codes, scales), *_ = normal_dispatch(buffer, quantize_1x128(x), idx)
        with pytest.raises(RuntimeError, match="does not require grad"):
            dequantize_1x128(codes, scales).sum().backward()


# -- F07: weights that change between two forwards --------------------------------------------------------------------


def _double_data(experts: torch.nn.Module) -> None:
    for parameter in experts.parameters():
        parameter.data.mul_(2)


def _double_with_an_optimizer(experts: torch.nn.Module) -> None:
    """w - lr * grad = w + w, for all at once."""
    optimizer = torch.optim.SGD(experts.parameters(), lr=1.0, foreach=True)
    for parameter in experts.parameters():
        parameter.grad = -parameter.detach()
    optimizer.step()
    optimizer.zero_grad()


def _double_by_loading(experts: torch.nn.Module) -> None:
    experts.load_state_dict({name: 2 * weight for name, weight in experts.state_dict().items()})


def changed_weights(group: dist.ProcessGroup, change: Callable[[torch.nn.Module], None]) -> None:
    """Forward, change, forward; then two micro-batches under recompute against both at once."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=128, ffn_hidden_size=64, num_experts=4, router=RouterConfig(topk=2), init_std=0.1)
    layer = moe_ep.MoELayer(config, group if world > 1 else None)
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(rank))
    up = layer.experts.gate_up
    assert isinstance(up, torch.nn.Parameter)
    with torch.no_grad():
        before, kept = layer(x), up.clone()
        change(layer.experts)
        up.copy_(kept)  # SwiGLU is not linear in these
        assert torch.equal(layer(x), 2 * before)
    checkpoint(layer, x[:3], use_reentrant=False).sum().backward()
    checkpoint(layer, x[3:], use_reentrant=False).sum().backward()
    summed = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    layer(x).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(summed[name], parameter.grad, rtol=1e-4, atol=1e-5)
    layer.buffer.close()


# case F07 (the way of the weights; FP8 experts: tests/unit/test_fp8_weights.py)
@pytest.mark.parametrize("change", [_double_data, _double_with_an_optimizer, _double_by_loading])
@pytest.mark.parametrize("world", [1, 2])
def test_changed_weights_are_those_of_the_next_forward(
    ranks: Pools, world: int, change: Callable[[torch.nn.Module], None]
) -> None:
    ranks.run(changed_weights, world, change)
