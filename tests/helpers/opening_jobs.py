"""What ranks do with a buffer between nodes where one refuses, or is in another call: who learns of it, and when.

Calls are made of the backend, which looks at no record on entry: so the device alone tells the ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.backends.base import Backend
from moe_ep.backends.private_group import PrivateGroup
from moe_ep.handle import DispatchHandle
from tests.helpers.compare import assert_same_bits

HIDDEN, NUM_TOPK = 64, 3
CALLS = ("cached dispatch", "combine", "combine backward", "dispatch backward")
MEETINGS = ("all_to_all", "all_to_all_host", "all_reduce", "exchange_text")
SHAPES = [(2, 1), (2, 2), (3, 1), (1, 2)]  # (nodes, ranks a node)
LAYOUTS = ["compact", "expert_major"]
ODD = [(2, 1, 1), (2, 2, 3), (2, 2, 0), (3, 1, 2), (1, 2, 1)]  # with the rank that differs
TIGHT = 1 << 14  # bytes of a rail: calls of several rounds


@dataclass
class Scene:
    """A buffer, a dispatch through it, and rows for calls along its handle.

    Rank 0 has no tokens; of more than two ranks, rank 1 has no experts.
    """

    buffer: moe_ep.Buffer
    handle: DispatchHandle
    x: Tensor
    rows: Tensor
    row_weights: Tensor
    device: str

    @property
    def backend(self) -> Backend:
        return self.buffer.backend

    def num_exchanges(self, name: str) -> int:
        """Of a call: sums of rows and of weights are asked for one after the other."""
        return 2 if name == "combine" and self.handle.layout == "compact" else 1

    def call(self, name: str, hidden: int = HIDDEN) -> list[Tensor]:
        """The outputs of a call along the handle, with the first `hidden` numbers of each row."""
        backend, x, rows = self.backend, self.x[:, :hidden].contiguous(), self.rows[:, :hidden].contiguous()
        is_weighted = self.handle.layout == "expert_major"
        weights = self.row_weights if is_weighted else None
        with torch.no_grad():
            if name == "cached dispatch":
                return [backend.dispatch(self.handle, x)]
            if name == "combine":
                sums = [backend.combine(self.handle, rows, weights, exact=False)]
                return sums if is_weighted else [*sums, backend.sum_weights(self.handle, self.row_weights)]
            if name == "combine backward":
                grads = backend.combine_backward(self.handle, x, rows if is_weighted else None, weights)
            else:
                grads = backend.dispatch_backward(self.handle, rows, self.row_weights)  # type: ignore[assignment]
            return [grad for grad in grads if grad is not None]

    def said(self) -> str:
        """What `check` raises once the device is through, or nothing."""
        self.synchronize()
        try:
            self.buffer.check()
        except RuntimeError as error:
            return str(error)
        return ""

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@contextmanager
def scene(group: dist.ProcessGroup, hop: str, device: str, ranks_per_node: int, layout: str) -> Iterator[Scene]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    num_experts = 2 * world
    owners = [0 if owner == 1 and world > 2 else owner for owner in range(world) for _ in range(2)]
    g = torch.Generator().manual_seed(rank)
    num_tokens = 0 if rank == 0 else 30 + 7 * rank
    x = torch.randn(num_tokens, HIDDEN, generator=g).bfloat16().to(device).requires_grad_()
    idx = torch.rand(num_tokens, num_experts, generator=g).argsort(dim=1)[:, :NUM_TOPK].to(device)
    weights = torch.rand(num_tokens, NUM_TOPK, generator=g).to(device).requires_grad_()
    settings: dict[str, Any] = {"hop": hop, "ranks_per_node": ranks_per_node, "expert_placement": owners}
    with moe_ep.Buffer(group, backend="internode", timeout_secs=20, **settings) as buffer:
        out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=num_experts, layout=layout)
        assert isinstance(out.handle, DispatchHandle)
        assert out.topk_weights is not None
        yield Scene(buffer, out.handle, x.detach(), out.x.detach().clone(), out.topk_weights.detach(), device)


@contextmanager
def no_host() -> Iterator[None]:
    """In here nobody meets on the host."""
    met = AssertionError("the ranks met on the host")
    with ExitStack() as patches:
        for name in MEETINGS:
            patches.enter_context(mock.patch.object(PrivateGroup, name, side_effect=met))
        yield


def calls_stay_on_the_device(group: dist.ProcessGroup, hop: str, device: str, ranks_per_node: int, layout: str) -> int:
    """Each call along a handle, the first time too. How many there were."""
    num_calls = 0
    with scene(group, hop, device, ranks_per_node, layout) as here:
        for number in range(2):
            with no_host():
                outputs = {name: here.call(name) for name in CALLS}
            num_calls += len(outputs)
            assert_same_bits(outputs["cached dispatch"][0], here.rows, f"rows, time {number}")
            assert here.said() == ""
    return num_calls


def refusals(group: dist.ProcessGroup, hop: str, device: str, ranks_per_node: int, layout: str) -> list[str]:
    """Every rank refuses once in every call: what all raise or are told of it, and that the next call is right."""
    said = []
    with scene(group, hop, device, ranks_per_node, layout) as here:
        for name in CALLS:
            right = here.call(name)
            for refuser in range(here.buffer.group_size):
                said.append(_one_refuses(here, name, refuser))
                for number, (one, two) in enumerate(zip(here.call(name), right, strict=True)):
                    assert_same_bits(one, two, f"output {number} of {name} behind the refusal of rank {refuser}")
                assert here.said() == ""
    return said


def told_of_refusals(world: int) -> list[str]:
    """What `refusals` gives on every rank."""
    return [f"EP rank {rank} refused {name}: not {name}, 0." for name in CALLS for rank in range(world)]


def _one_refuses(here: Scene, name: str, refuser: int) -> str:
    """The sentence on this rank; of two refused exchanges the first is told."""
    if here.buffer.rank == refuser:
        sentences = []
        for number in range(here.num_exchanges(name)):
            with pytest.raises(ValueError, match=f"EP rank {refuser} refused {name}: ") as caught:
                here.backend.refuse(name, ValueError(f"not {name}, {number}."))
            sentences.append(str(caught.value))
        assert here.said() == ""
        return sentences[0]
    outputs = here.call(name)
    here.synchronize()
    assert all(bool(output.isnan().all()) for output in outputs), name
    told = here.said()
    assert ("One more call was refused" in told) == (here.num_exchanges(name) > 1)
    return told.split(" One more call")[0]


def disagreements(group: dist.ProcessGroup, hop: str, device: str, ranks_per_node: int, odd: int) -> list[str]:
    """Rank `odd` has rows of another width, then is in another call, then has another handle: what all are told."""
    said = []
    with scene(group, hop, device, ranks_per_node, "compact") as here:
        is_odd, idx = here.buffer.rank == odd, here.handle.slot_rank[:, :1] * 2
        num_experts = here.handle.num_experts
        other = moe_ep.dispatch(here.buffer, here.x, idx, None, num_experts=num_experts, layout="compact").handle
        assert isinstance(other, DispatchHandle)
        cases: list[Callable[[], list[Tensor]]] = [
            lambda: here.call("cached dispatch", HIDDEN // 2 if is_odd else HIDDEN),
            lambda: here.call("combine backward" if is_odd else "cached dispatch"),
            lambda: [here.backend.dispatch(other if is_odd else here.handle, here.x)],
        ]
        for case in cases:
            outputs = case()
            here.synchronize()
            assert all(bool(output.isnan().all()) for output in outputs)
            said.append(here.said())
            assert_same_bits(here.call("cached dispatch")[0], here.rows, "rows behind a disagreement")
            assert here.said() == ""
    return said


def check_disagreements(told: list[str], odd: int) -> None:
    """What a rank is told of them."""
    width, operation, handle = told
    assert "disagree on the hidden size H" in width
    assert f"rank {odd} has {HIDDEN // 2}" in width
    assert f"rank {odd} has combine backward" in operation
    assert "has cached dispatch" in operation
    assert "disagree on the routing of the dispatch that is combined" in handle


def weights_beside(group: dist.ProcessGroup, hop: str, device: str, ranks_per_node: int, odd: str) -> str:
    """Sums of rows and of their weights, as DeepEP asks for them at once; then the last rank errs, as `odd` says."""
    with scene(group, hop, device, ranks_per_node, "compact") as here:
        right, is_last = here.call("combine"), here.buffer.rank == here.buffer.group_size - 1
        rows, weights = here.rows, here.row_weights
        for _ in range(2):
            with no_host():
                y, summed, _ = here.buffer.combine(rows, here.handle, weights)
            assert summed is not None
            assert_same_bits(y, right[0], "sums of rows")
            assert_same_bits(summed, right[1], "sums of weights")
        if odd == "refuses" and is_last:
            with pytest.raises(ValueError, match="refused combine: ") as caught:
                here.buffer.combine(rows[:-1], here.handle, weights)
            said = str(caught.value)
        else:
            given = None if odd == "sums no weights" and is_last else weights
            y, summed, _ = here.buffer.combine(rows, here.handle, given)
            here.synchronize()
            assert all(bool(sums.isnan().all()) for sums in (y, summed) if sums is not None)
            said = here.said()
        assert_same_bits(here.call("cached dispatch")[0], here.rows, "rows of the next call")
        for one, two in zip(here.call("combine"), right, strict=True):
            assert_same_bits(one, two, "sums of a later call")
        assert here.said() == ""
    return said


def check_weights_beside(said: str, last: int, odd: str) -> None:
    """What a rank is told of it."""
    if odd == "refuses":
        assert said.startswith(f"EP rank {last} refused combine: rows")
    else:
        assert "disagree on the dtype of topk_weights: rank " in said
        assert f" has torch.float32, rank {last} has none" in said
    assert "more call" not in said


def random_calls(
    group: dist.ProcessGroup, hop: str, device: str, ranks_per_node: int, layout: str, num_calls: int
) -> int:
    """Calls in any order, some of them refused by some rank, some looked at late. The number of refusals."""
    dice, num_refusals = random.Random(num_calls), 0
    told_of: list[str] = []  # refusals of other ranks that this one has not looked at
    with scene(group, hop, device, ranks_per_node, layout) as here:
        names = [name for name in CALLS if here.num_exchanges(name) == 1]
        right = {(name, hidden): here.call(name, hidden) for name in names for hidden in (HIDDEN, HIDDEN // 2)}
        for _ in range(num_calls):
            name, hidden = dice.choice(names), dice.choice((HIDDEN, HIDDEN // 2))
            refuser = dice.randrange(here.buffer.group_size) if dice.random() < 0.3 else None
            looks = dice.random() < 0.4
            num_refusals += refuser is not None
            if refuser == here.buffer.rank:
                with pytest.raises(ValueError, match=f"EP rank {refuser} refused {name}: no."):
                    here.backend.refuse(name, ValueError("no."))
            else:
                outputs = here.call(name, hidden)
                if refuser is None:
                    for one, two in zip(outputs, right[name, hidden], strict=True):
                        assert_same_bits(one, two, name)
                else:
                    told_of.append(f"EP rank {refuser} refused {name}: no.")
                    here.synchronize()
                    assert all(bool(output.isnan().all()) for output in outputs)
            if looks:
                said = here.said()
                assert said.startswith(told_of[0]) if told_of else said == "", said
                told_of.clear()
        here.said()
    return num_refusals
