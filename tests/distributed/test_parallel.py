"""Scales of gradients over EP and DP, clipping over both kinds of parameter, and the bias step over all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import moe_ep
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from moe_ep.parallel import clip_grad_norm, reduce_gradients
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import device_of

X = [[10.0, 11.0], [20.0, 21.0]]  # of rank 0 and rank 1


class _ScaleExperts(nn.Module):
    """f_e(v) = s_e * v; the scales of this rank, marked as expert parameters."""

    def __init__(self, buffer: moe_ep.Buffer, num_experts: int) -> None:
        super().__init__()
        mine = torch.tensor(buffer.placement(num_experts).experts_of(buffer.rank), dtype=torch.float32) + 1
        self.scale = nn.Parameter(mine.to(device_of(buffer.backend_name)))
        self.scale.allreduce = False  # type: ignore[attr-defined]
        self.buffer, self.num_experts = buffer, num_experts

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        out = moe_ep.dispatch(self.buffer, x, idx, weights, num_experts=self.num_experts)
        rows = self.scale[out.topk_idx].unsqueeze(1) * out.x
        return moe_ep.combine(self.buffer, rows, out.handle, out.topk_weights)


def expert_scale(group: dist.ProcessGroup, ep: bool, backend: str = "auto") -> list[float]:
    """Gradients of the scales for the mean loss, with EP over both ranks or with all experts on each (DP)."""
    rank, device = dist.get_rank(group), device_of(backend)
    with moe_ep.Buffer(group if ep else None, backend=backend, timeout_secs=20) as buffer:
        experts = _ScaleExperts(buffer, 2)
        x, idx = torch.tensor(X[rank], device=device).unsqueeze(1), torch.tensor([[0], [1]], device=device)
        experts(x, idx, torch.ones(2, 1, device=device)).mean().backward()
        reduce_gradients(experts.parameters(), group, None if ep else group)
        assert experts.scale.grad is not None
        return experts.scale.grad.tolist()


def test_expert_gradients_do_not_depend_on_how_the_ranks_are_used(ranks: Pools) -> None:  # case L01
    with_ep = ranks.run(expert_scale, 2, True)
    assert [with_ep[0][0], with_ep[1][0]] == [7.5, 8.0]
    assert ranks.run(expert_scale, 2, False) == [[7.5, 8.0]] * 2


def sgd(group: dist.ProcessGroup, ep: bool, backend: str = "auto") -> list[float]:
    rank, device = dist.get_rank(group), device_of(backend)
    with moe_ep.Buffer(group if ep else None, backend=backend, timeout_secs=20) as buffer:
        experts = _ScaleExperts(buffer, 2)
        optimizer = torch.optim.SGD(experts.parameters(), lr=1e-3)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.tensor(X[rank], device=device).unsqueeze(1) + step
            idx = torch.tensor([[0], [1]], device=device)
            experts(x, idx, torch.ones(2, 1, device=device)).square().mean().backward()
            reduce_gradients(experts.parameters(), group, None if ep else group)
            optimizer.step()
        return experts.scale.detach().tolist()


def test_five_steps_end_in_the_same_parameters_with_ep_and_with_dp(ranks: Pools) -> None:  # case L01
    with_ep, with_dp = ranks.run(sgd, 2, True), ranks.run(sgd, 2, False)
    torch.testing.assert_close(torch.tensor(with_ep).flatten(), torch.tensor(with_dp[0]), rtol=1e-6, atol=0)


def router_gradient(group: dist.ProcessGroup, backend: str = "auto") -> list[list[float]]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    device = device_of(backend)
    tokens = torch.tensor([[1.0, 2.0], [2.0, -1.0]], device=device)
    config = MoEConfig(hidden_size=2, ffn_hidden_size=1, num_experts=2, router=RouterConfig(topk=2))
    with moe_ep.Buffer(group, backend=backend, timeout_secs=20) as buffer:
        router = moe_ep.TopKRouter(config, buffer).to(device)
        nn.init.zeros_(router.weight)
        experts = _ScaleExperts(buffer, 2)
        x = tokens if world == 1 else tokens[rank : rank + 1]
        idx, weights = router(x)
        y = experts(x, idx, weights)
        (y.sum() / len(x)).backward()
        reduce_gradients([router.weight], group)
        assert router.weight.grad is not None
        return router.weight.grad.tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_the_router_gradient_holds_every_experts_part(ranks: Pools, world: int) -> None:  # case L03
    for grad in ranks.run(router_gradient, world):
        torch.testing.assert_close(torch.tensor(grad), torch.tensor([[-0.625, -0.625], [0.625, 0.625]]))


def _clip(group: dist.ProcessGroup, expert_norms: list[float | None], norm_type: float) -> tuple[float, float]:
    rank = dist.get_rank(group)
    dense, expert = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1))
    expert.allreduce = False  # type: ignore[attr-defined]
    dense.grad = torch.ones(4)  # norm 2, the same on every rank
    own = expert_norms[rank]
    expert.grad = None if own is None else torch.tensor([own])
    norm = clip_grad_norm([dense, expert], 1.0, group, norm_type)
    return float(norm), float(dense.grad[0])


@pytest.mark.parametrize(  # case L04
    ("expert_norms", "norm_type", "expected"),
    [
        ([4.0, 0.0], 2.0, 4.472136),
        ([4.0, None], 2.0, 4.472136),
        ([4.0, 3.0], 2.0, 5.385165),
        ([4.0, 3.0], float("inf"), 4.0),
    ],
)
def test_the_norm_counts_replicas_once_and_the_experts_of_all_ranks(
    ranks: Pools, expert_norms: list[float | None], norm_type: float, expected: float
) -> None:
    for norm, clipped in ranks.run(_clip, 2, expert_norms, norm_type):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert clipped == pytest.approx(1.0 / expected, rel=1e-5)


def _overflow(group: dist.ProcessGroup) -> bool:
    rank = dist.get_rank(group)
    expert = nn.Parameter(torch.zeros(1))
    expert.allreduce = False  # type: ignore[attr-defined]
    expert.grad = torch.tensor([float("inf") if rank == 1 else 1.0])
    return bool(clip_grad_norm([expert], 1.0, group).isfinite())


def test_an_overflow_in_one_ranks_expert_is_seen_by_all(ranks: Pools) -> None:  # case L05
    assert ranks.run(_overflow, 2) == [False, False]


def _skipped_expert(group: dist.ProcessGroup) -> list[float]:
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        experts = _ScaleExperts(buffer, 2)
        with torch.no_grad():
            experts.scale[experts.scale == 2.0] = 4.0
        optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1, weight_decay=0.1)
        experts(torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)).sum().backward()
        assert experts.scale.grad is not None
        optimizer.step()
        return experts.scale.detach().tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_an_expert_without_tokens_still_decays(ranks: Pools, world: int) -> None:  # case E03
    assert ranks.run(_skipped_expert, world)[-1][-1] == pytest.approx(3.96, rel=1e-6)


def bias_step(group: dist.ProcessGroup, backend: str = "auto") -> list[float]:
    """Counts 257 and 256 over the group: integers must not be rounded on the way (case B08)."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    router = RouterConfig(topk=1, score_function="sigmoid", expert_bias=True, bias_update_rate=0.5)
    ep = EPConfig(backend=backend)
    config = MoEConfig(hidden_size=4, ffn_hidden_size=2, num_experts=2, router=router, ep=ep)
    layer = moe_ep.MoELayer(config, group).to(device_of(backend))
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
    share = range(rank * 513 // world, (rank + 1) * 513 // world)
    x = torch.tensor([[1.0 if i < 257 else -1.0, 0, 0, 0] for i in share], device=device_of(backend))
    layer(x).sum().backward()
    with torch.no_grad():
        layer(x)  # evaluation does not count (case B02)
    layer.update_expert_bias()
    assert layer.router.expert_bias is not None
    layer.buffer.close()
    return layer.router.expert_bias.tolist()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_bias_step_sees_the_tokens_of_all_ranks(ranks: Pools, world: int) -> None:
    assert ranks.run(bias_step, world) == [[-0.5, 0.5]] * world
