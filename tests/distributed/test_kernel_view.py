"""The routing of a handle as the CUDA kernels read it, against plain loops over the ids of all ranks."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep._native.exchange import ExchangeKernels
from moe_ep.backends.kernel_view import kernel_view
from tests.distributed.conformance import NUM_TOPK, owner_table
from tests.helpers.ranks import Pools
from tests.helpers.routing import ROUTINGS, TOKEN_COUNTS, make_inputs


class Sizes:
    """The numbers of csrc/exchange/exchange.h, with chunks so small that a source has several."""

    max_chunks = 4

    def chunk_tokens(self, num_tokens: int) -> int:
        return max(2, -(-num_tokens // 4))


KERNELS = cast(ExchangeKernels, Sizes())


def _compact_rows(ids: list[list[list[int]]], owner: list[int], rank: int) -> list[tuple[int, int]]:
    """(source, token) of every compact row on `rank`."""
    return [
        (source, token)
        for source, tokens in enumerate(ids)
        for token, slots in enumerate(tokens)
        if any(expert >= 0 and owner[expert] == rank for expert in slots)
    ]


def _check(group: dist.ProcessGroup, layout: str, alignment: int, spare: int | None) -> int:
    """`spare`: max_rows leaves so many rows free; None for a call without max_rows."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    num_experts, num_checks = 2 * world + 1, 0
    owner = owner_table(num_experts, world)
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        for routing, tokens in itertools.product(ROUTINGS, TOKEN_COUNTS):
            inputs = make_inputs(routing, tokens, world, 4, NUM_TOPK, num_experts, torch.float32)
            ids = [idx.tolist() for _, idx, _ in inputs]
            arguments: dict[str, Any] = {"num_experts": num_experts, "layout": layout, "alignment": alignment}
            out = moe_ep.dispatch(buffer, *inputs[rank], **arguments)
            if spare is not None:
                out = moe_ep.dispatch(buffer, *inputs[rank], **arguments, max_rows=out.x.shape[0] + spare)
            handle = out.handle
            assert isinstance(handle, moe_ep.DispatchHandle)
            view = kernel_view(handle, KERNELS, num_experts)
            _check_geometry(view, ids, owner)
            for token, peer in itertools.product(range(len(ids[rank])), range(world)):
                rows = _compact_rows(ids, owner, peer)
                goes = (rank, token) in rows
                assert int(view.token_row[token, peer]) == (rows.index((rank, token)) if goes else -1)
            pair_row = {int(pair): row for row, pair in enumerate(handle.row_pair.tolist()) if pair >= 0}
            flat = view.pair_row.flatten().tolist()
            assert len(flat) == (handle.num_compact_rows * NUM_TOPK if layout == "expert_major" else 0)
            assert flat == [pair_row.get(pair, -1) for pair in range(len(flat))]
            num_checks += 1
    return num_checks


def _check_geometry(view: moe_ep.DispatchHandle, ids: list[list[list[int]]], owner: list[int]) -> None:
    world, rank, num_experts = len(view.ranks), view.rank, view.num_experts
    numbers = view.geometry.tolist()
    assert view.geometry.dtype == torch.int32
    num_compact, num_rows, overflowed, _ = numbers[:4]
    rows = _compact_rows(ids, owner, rank)
    assert (num_compact, overflowed) == (len(rows), 0)
    place = 4
    assert numbers[place : place + world] == [len(tokens) for tokens in ids]
    place += world
    for source, peer in itertools.product(range(world), range(world)):
        sent = sum(s == source for s, _ in _compact_rows(ids, owner, peer))
        assert numbers[place + source * world + peer] == sent
    place += world * world
    for source in range(world):
        size = KERNELS.chunk_tokens(len(ids[source]))
        for chunk in range(Sizes.max_chunks + 1):
            begin = sum((s, t) < (source, chunk * size) for s, t in rows)
            assert numbers[place] == begin, f"chunk {chunk} of source {source}"
            place += 1
    offsets, counts = numbers[place : place + num_experts + 1], numbers[place + num_experts + 1 :]
    assert len(counts) == num_experts
    if view.layout == "compact":
        assert num_rows == num_compact  # the kernels fill what lies behind
        return
    padding = {row for row, pair in enumerate(view.row_pair.tolist()) if pair < 0}
    filled = {
        row for i, count in enumerate(counts) for row in range(offsets[i] + count, min(offsets[i + 1], view.num_rows))
    }
    assert filled | set(range(num_rows, view.num_rows)) == padding


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("spare", [None, 0, 5])
@pytest.mark.parametrize(("layout", "alignment"), [("compact", 1), ("expert_major", 1), ("expert_major", 4)])
def test_the_view_is_what_the_plan_kernel_lays_down(
    ranks: Pools, layout: str, alignment: int, spare: int | None, world: int
) -> None:
    num_checks = len(ROUTINGS) * len(TOKEN_COUNTS)
    assert ranks.run(_check, world, layout, alignment, spare) == [num_checks] * world
