"""A rank that refuses an FP8 dispatch, where a cast exchanges something before the rows set out. Case P07."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import moe_ep
from tests.distributed.test_fp8_experts import EXPERTS, HIDDEN, TOPK, make_layer
from tests.helpers.compare import assert_same_bits
from tests.helpers.fake_transformer_engine import DType, QuantizedTensor
from tests.helpers.ranks import Pools

LIMIT_SECS = 20.0  # of the buffer: nobody may come near it
RECIPES = ("blockwise", "current", "delayed")


def refused(group: dist.ProcessGroup, recipe: str) -> float:
    """Rank 0 gives what cannot be sent, to the call and then to the layer; seconds until every rank has raised."""
    is_wrong = dist.get_rank(group) == 0
    layer = make_layer(group, torch.float32, recipe=recipe)
    layer.buffer.close()
    assert layer.experts.fp8 is not None
    x, idx = torch.randn(4, HIDDEN), torch.zeros(4, TOPK, dtype=torch.int64)
    began = time.monotonic()
    with moe_ep.Buffer(group, timeout_secs=LIMIT_SECS) as buffer:
        layer.buffer = buffer
        cast = layer.experts.fp8.recipe.payload
        with pytest.raises(TypeError, match="EP rank 0 refused (dispatch|all_reduce): topk_idx is torch.float32"):
            moe_ep.dispatch_fp8(buffer, x, idx.float() if is_wrong else idx, num_experts=EXPERTS, cast=cast)
        with pytest.raises(ValueError, match="EP rank 0 refused (dispatch|all_reduce): x is torch.float32 of shape"):
            layer(x[:, 1:] if is_wrong else x)
        took_secs = time.monotonic() - began
        layer(x).sum().backward()  # the buffer goes on, on all ranks in step
    return took_secs


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_rank_raises_what_one_refused_and_none_waits(ranks: Pools, recipe: str) -> None:
    assert max(ranks.run(refused, 2, recipe)) < LIMIT_SECS / 4


def one_scale(group: dist.ProcessGroup) -> None:
    """A `Float8Tensor` on each rank, all rows to the other rank; first with one scale, then with two."""
    rank = dist.get_rank(group)
    codes = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(torch.float8_e4m3fn)
    idx = torch.full((3, 1), 1 - rank)

    def quantised(scale: float) -> torch.Tensor:
        data = {"data": codes.view(torch.uint8), "fp8_scale_inv": torch.tensor([scale])}
        return QuantizedTensor((3, HIDDEN), torch.bfloat16, fp8_dtype=DType.kFloat8E4M3, **data)  # type: ignore[no-any-return]

    with moe_ep.Buffer(group, timeout_secs=LIMIT_SECS) as buffer:
        out = moe_ep.dispatch_fp8(buffer, quantised(0.5), idx, num_experts=2)
        home = moe_ep.combine(buffer, out.rows.values(torch.float32), out.handle)
        assert_same_bits(home, codes.float() * 0.5, "there and back")
        with pytest.raises(ValueError, match=r"those of the ranks go from 0\.5 to 1; .* must be the same"):
            moe_ep.dispatch_fp8(buffer, quantised(0.5 + 0.5 * rank), idx, num_experts=2)


def test_rows_with_one_scale_a_rank_are_refused_and_not_read_with_anothers(ranks: Pools) -> None:
    ranks.run(one_scale, 2)
