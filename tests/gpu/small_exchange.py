"""Every kernel of an exchange once, on small shapes: what scripts/sanitize.sh looks at.

python -m tests.gpu.small_exchange WORLD
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import moe_ep
from moe_ep.fp8 import quantize_1x128
from tests.helpers.ranks import Pool

LIMIT_SECS = 110.0
HIDDEN = (64, 1536, 7168)  # rows of one piece, for one warp and for several, and of several pieces


def exchange(group: dist.ProcessGroup) -> int:
    """All operations in both layouts; the number of round trips."""
    num_trips = 0
    moe_ep.Buffer.set_num_sms(2)
    with moe_ep.Buffer(group, backend="intranode", timeout_secs=60) as buffer:
        for hidden in HIDDEN:
            for layout in ("compact", "expert_major"):
                for max_rows in (None, 400):
                    _round_trip(buffer, hidden, layout, max_rows)
                    num_trips += 1
            _normal_mode(buffer, hidden)
            _low_latency(buffer, hidden)
        assert buffer.all_reduce(torch.ones(3, device="cuda")).tolist() == [float(buffer.group_size)] * 3
        torch.cuda.synchronize()
        buffer.check()
    return num_trips


def _inputs(rank: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    x, idx = torch.randn(40 + rank, hidden, generator=g), torch.randint(-1, 8, (40 + rank, 3), generator=g)
    return x.cuda().bfloat16(), idx.cuda(), torch.rand(40 + rank, 3, generator=g).cuda()


def _round_trip(buffer: moe_ep.Buffer, hidden: int, layout: str, max_rows: int | None) -> None:
    x, idx, weights = _inputs(buffer.rank, hidden)
    x.requires_grad_()
    weights.requires_grad_()
    out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=8, layout=layout, alignment=8, max_rows=max_rows)
    given = out.topk_weights if layout == "expert_major" else None
    for exact in (False, True) if layout == "expert_major" else (False,):
        y = moe_ep.combine(buffer, out.x, out.handle, given, exact=exact)
        assert out.topk_weights is not None
        torch.autograd.backward([y.sum(), out.topk_weights.sum()], retain_graph=True)
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def _normal_mode(buffer: moe_ep.Buffer, hidden: int) -> None:
    x, idx, weights = _inputs(buffer.rank, hidden)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 8)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    rows, _, row_weights, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=idx, topk_weights=weights)
    assert handle is not None
    assert isinstance(rows, torch.Tensor)
    buffer.dispatch(quantize_1x128(x), handle=handle)
    y, summed, _ = buffer.combine(rows, handle, topk_weights=row_weights, bias=x)
    assert summed is not None
    assert bool(y.isfinite().all())


@torch.no_grad()
def _low_latency(buffer: moe_ep.Buffer, hidden: int) -> None:
    """In one kernel and in two halves, rows as they are and in FP8."""
    x, idx, weights = _inputs(buffer.rank, hidden)
    for in_halves in (False, True):
        rows, _, handle, _, receive = buffer.low_latency_dispatch(
            x, idx, 48, 8, use_fp8=in_halves and hidden % 128 == 0, return_recv_hook=in_halves
        )
        if receive is not None:
            receive()
        made = torch.ones(handle.shape, dtype=torch.bfloat16, device="cuda")
        y, _, receive = buffer.low_latency_combine(made, idx, weights, handle, return_recv_hook=in_halves)
        if receive is not None:
            receive()
        assert y.shape == x.shape
        assert bool(y.isfinite().all())


def main() -> int:
    world = int(sys.argv[1])
    pool = Pool(world, on_cuda=True)
    num_trips = pool.run(exchange, world, (), LIMIT_SECS)[0]
    for pipe in pool.pipes:  # the ranks end by themselves, so that whoever watches them can report
        pipe.close()
    for process in pool.processes:
        process.join(LIMIT_SECS)
    sys.stdout.write(f"small_exchange: {num_trips} round trips on {world} ranks\n")
    return max(process.exitcode or 0 for process in pool.processes)


if __name__ == "__main__":
    raise SystemExit(main())
