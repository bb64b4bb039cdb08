"""Memory that nothing wrote, and memory that the caller gave back: the parts of T01, T02 and T04 that need no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from tests.distributed.test_layer import layer_config
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import Setup, open_buffer, setups, uninitialised_is_nan


def two_hundred_steps(group: dist.ProcessGroup) -> None:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(0)
    layer = moe_ep.MoELayer(layer_config(), group)
    x = torch.randn(5 + rank * (rank < world - 1), 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    first: dict[str, Tensor] = {}
    with uninitialised_is_nan():
        for step in range(200):
            layer.zero_grad()
            x.grad = None
            y = layer(x)
            y.square().sum().backward()
            assert x.grad is not None
            values = {"y": y.detach(), "dx": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}  # type: ignore[dict-item]
            first = first or {name: value.clone() for name, value in values.items()}
            for name, value in values.items():
                assert not bool(value.isnan().any()), f"{name} of step {step}"
                assert_same_bits(value, first[name], f"{name} of step {step}")
    layer.buffer.close()


# case T01 (CPU)
@pytest.mark.parametrize("world", [1, 2])
def test_two_hundred_steps_over_memory_of_nans_have_the_bits_of_the_first(ranks: Pools, world: int) -> None:
    ranks.run(two_hundred_steps, world)


def mask_and_call(group: dist.ProcessGroup, setup: Setup) -> None:
    """Half of the slots are unused, which is written last thing before the call."""
    g = torch.Generator().manual_seed(dist.get_rank(group))
    with open_buffer(group, setup.backend) as buffer:
        for _ in range(100):
            idx = torch.randint(0, 4, (16, 2), generator=g)
            unused = torch.zeros(16, 2, dtype=torch.bool)
            unused.view(-1)[torch.randperm(32, generator=g)[:16]] = True
            x, weights = torch.ones(16, 4), torch.ones(16, 2)
            out = moe_ep.dispatch(buffer, x, idx.masked_fill_(unused, -1), weights, num_experts=4, layout=setup.layout)
            counts = torch.bincount(idx[idx >= 0], minlength=4)
            dist.all_reduce(counts, group=group)
            assert out.real_tokens_per_expert is not None
            mine = list(buffer.placement(4).experts_of(buffer.rank))
            assert out.real_tokens_per_expert == counts[mine].tolist()
            assert int((out.topk_idx >= 0).sum()) == sum(out.real_tokens_per_expert)
            row_weights = out.topk_weights if setup.layout == "expert_major" else None
            y = moe_ep.combine(buffer, out.x, out.handle, row_weights)
            used = ~unused if setup.layout == "expert_major" else _ranks_of(idx, buffer)
            assert torch.equal(y[:, 0], used.sum(dim=1).float())


def _ranks_of(idx: Tensor, buffer: moe_ep.Buffer) -> Tensor:
    """[T, W] whether a token has an expert on a rank: compact rows are one each."""
    owner = torch.tensor([*buffer.placement(4).owner, -1])[idx]
    return torch.stack([(owner == rank).any(dim=1) for rank in range(buffer.group_size)], dim=1)


# case T02 (CPU)
@setups(1, 2)
def test_ids_written_right_before_the_call_are_those_that_count(ranks: Pools, setup: Setup) -> None:
    ranks.run(mask_and_call, setup.world, setup)


def give_back_at_once(group: dist.ProcessGroup, setup: Setup) -> None:
    """Inputs and dy are dropped right after the call, and their memory is written over."""
    rank, seen = dist.get_rank(group), []
    with open_buffer(group, setup.backend) as buffer:
        for step in range(250):
            g = torch.Generator().manual_seed(rank)
            idx = torch.randint(-1, 4, (7 + rank, 2), generator=g)
            leaf, leaf_weights = torch.randn(7 + rank, 8, generator=g), torch.rand(7 + rank, 2, generator=g)
            leaf.requires_grad_()
            leaf_weights.requires_grad_()
            x, weights = leaf * 2, leaf_weights * 2
            out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=4, layout=setup.layout)
            if step:  # the first step keeps all
                del x, idx, weights
                taken = [torch.full((7 + rank, n), 7777, dtype=dtype) for n, dtype in _SIZES for _ in range(4)]
            row_weights = out.topk_weights if setup.layout == "expert_major" else None
            y = moe_ep.combine(buffer, out.x.sin(), out.handle, row_weights)
            dy = torch.rand(y.shape, generator=g)
            y.register_hook(lambda grad: grad.clone())  # a gradient that nobody but the backward holds
            loss = (y * dy).sum()
            if step:
                del out, row_weights, dy
                taken += [torch.full((7 + rank, n), 7777, dtype=dtype) for n, dtype in _SIZES for _ in range(4)]
            loss.backward()
            seen.append((y.detach(), leaf.grad, leaf_weights.grad))
    for of_step in seen[1:]:
        for name, value, expected in zip(("y", "dx", "dw"), of_step, seen[0], strict=True):
            if value is None:
                assert expected is None
            else:
                assert_same_bits(value, expected, name)


_SIZES = ((8, torch.float32), (2, torch.int64), (2, torch.float32))


# case T04 (CPU)
@setups(1, 2)
def test_inputs_may_be_given_back_right_after_the_call(ranks: Pools, setup: Setup) -> None:
    ranks.run(give_back_at_once, setup.world, setup)
