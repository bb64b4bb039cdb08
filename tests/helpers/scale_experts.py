"""The common fixture of the fault cases: experts that multiply, so that every value can be checked by hand.

Expert e computes `f_e(v) = scale[e] * v` (plus `bias[e]` where a case asks for it); `scale[e]` starts at e + 1. With
the loss `sum over t of dy[t] * y[t].sum()` of every rank, dy = 1 unless a case says otherwise:

    y[t]    = sum over k of w[t, k] * scale[idx[t, k]] * x[t]        (slots of -1 left out)
    dx[t]   = dy[t] * sum over k of w[t, k] * scale[idx[t, k]]       (each element)
    dw[t,k] = dy[t] * scale[idx[t, k]] * x[t].sum()
    ds[e]   = sum over all ranks' slots (t, k) that name e of dy[t] * w[t, k] * x[t].sum()

A case lists the tokens of all ranks, so it can be spread over any number of ranks: no value may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moe_ep
from tests.helpers.ranks import Pools

BACKENDS = ("torch",)
LAYOUTS = ("expert_major", "compact")
TIMEOUT_SECS = 30.0  # of a wait that ends well; a test of the limit itself gives its own

# -- how a test is run ------------------------------------------------------------------------------------------------


def device_of(backend: str) -> str:
    """Where the tensors lie that a test gives to a backend."""
    return "cuda" if backend == "intranode" else "cpu"


@dataclass(frozen=True)
class Setup:
    """Where a case runs. `recompute` is "none", "non-reentrant" or "reentrant" (torch.utils.checkpoint)."""

    backend: str
    layout: str
    world: int
    alignment: int = 1
    exact: bool = False
    recompute: str = "none"
    x_needs_grad: bool = True
    weights_need_grad: bool = True
    scale_needs_grad: bool = True

    @property
    def device(self) -> str:
        return device_of(self.backend)


def setups(*worlds: int, layouts: Sequence[str] = LAYOUTS) -> pytest.MarkDecorator:
    """Parametrises a test by `setup`: every backend, layout and number of ranks."""
    return pytest.mark.parametrize(
        "setup",
        [
            pytest.param(Setup(backend, layout, world), id=f"{backend}-{layout}-W{world}", marks=mark(world))
            for backend in BACKENDS
            for layout in layouts
            for world in worlds
        ],
    )


def mark(world: int) -> pytest.MarkDecorator:
    return pytest.mark.world_size(world)


def open_buffer(group: dist.ProcessGroup, backend: str, **arguments: Any) -> moe_ep.Buffer:
    return moe_ep.Buffer(group, backend=backend, **{"timeout_secs": TIMEOUT_SECS, **arguments})


# -- what a test computes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The tokens of all ranks, in rank order: x [T, H], idx and weights [T, K], dy [T], scale and bias [E]."""

    x: Tensor
    idx: Tensor
    weights: Tensor
    dy: Tensor | None
    num_tokens: tuple[int, ...]  # of each rank, at the number of ranks for which the case is written down
    num_experts: int
    scale: Tensor
    bias: Tensor | None

    def tokens_of(self, world: int) -> list[int]:
        """Tokens of each of `world` ranks: as written down, or in even contiguous parts."""
        if world == len(self.num_tokens):
            return list(self.num_tokens)
        return [len(part) for part in torch.arange(self.x.shape[0]).tensor_split(world)]

    def experts_of(self, rank: int, world: int) -> list[int]:
        """The balanced contiguous split, the larger parts first."""
        return torch.arange(self.num_experts).tensor_split(world)[rank].tolist()


def make_case(
    x: Sequence[Sequence[float | Sequence[float]]],
    idx: Sequence[Sequence[Sequence[int]]],
    weights: Sequence[Sequence[Sequence[float]]],
    *,
    num_experts: int,
    hidden: int = 4,
    scale: Sequence[float] | None = None,
    bias: Sequence[float] | None = None,
    dy: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A case from lists by rank and token; a token given as one number has it in every hidden element."""
    values = [value for own in x for value in own]
    rows = [[value] * hidden if isinstance(value, (int, float)) else list(value) for value in values]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        x=torch.tensor(rows, dtype=dtype),
        idx=torch.tensor([slots for own in idx for slots in own]),
        weights=torch.tensor([slots for own in weights for slots in own], dtype=wide),
        dy=None if dy is None else torch.tensor(dy, dtype=dtype),
        num_tokens=tuple(len(own) for own in x),
        num_experts=num_experts,
        scale=torch.arange(1, num_experts + 1, dtype=wide) if scale is None else torch.tensor(scale, dtype=wide),
        bias=None if bias is None else torch.tensor(bias, dtype=wide),
    )


def random_case(
    num_tokens: Sequence[int],
    num_experts: int,
    num_topk: int,
    hidden: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Distinct random experts for every token; positive rows and weights that are not alike, so nothing cancels."""
    random = torch.Generator().manual_seed(seed)
    total = sum(num_tokens)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        x=(torch.rand(total, hidden, generator=random) + 0.5).to(dtype),
        idx=torch.rand(total, num_experts, generator=random).argsort(dim=1)[:, :num_topk].contiguous(),
        weights=(torch.rand(total, num_topk, generator=random) + 0.1).to(wide),
        dy=None,
        num_tokens=tuple(num_tokens),
        num_experts=num_experts,
        scale=torch.arange(1, num_experts + 1, dtype=wide),
        bias=None,
    )


@dataclass(frozen=True)
class Share:
    """What one rank holds of a case; x, weights, scale and bias are leaves."""

    x: Tensor
    idx: Tensor
    weights: Tensor
    dy: Tensor | None
    scale: Tensor
    bias: Tensor | None
    num_experts: int


def share(case: Case, group: dist.ProcessGroup, setup: Setup) -> Share:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    tokens = case.tokens_of(world)
    own = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    experts = case.experts_of(rank, world)

    def leaf(values: Tensor, needs_grad: bool) -> Tensor:
        return values.to(setup.device, copy=True).requires_grad_(needs_grad)

    return Share(
        x=leaf(case.x[own], setup.x_needs_grad),
        idx=case.idx[own].to(setup.device, copy=True),
        weights=leaf(case.weights[own], setup.weights_need_grad),
        dy=None if case.dy is None else case.dy[own].to(setup.device),
        scale=leaf(case.scale[experts], setup.scale_needs_grad),
        bias=None if case.bias is None else leaf(case.bias[experts], setup.scale_needs_grad),
        num_experts=case.num_experts,
    )


def apply_experts(out: moe_ep.DispatchOutput, scale_L: Tensor, bias_L: Tensor | None = None) -> Tensor:
    """The rows to combine. compact rows stand for several slots: their weighted sum, in slot order, is taken here."""
    wide = torch.float64 if out.x.dtype == torch.float64 else torch.float32
    x = out.x.to(wide)  # once, so that the slots' gradients are added in the wide dtype
    # One more entry of 0, on which the id -1 falls.
    scale = torch.cat([scale_L, scale_L.new_zeros(1)])
    bias = None if bias_L is None else torch.cat([bias_L, bias_L.new_zeros(1)])

    def expert(local: Tensor) -> Tensor:
        rows = x * scale[local.long()].unsqueeze(1)
        return (rows if bias is None else rows + bias[local.long()].unsqueeze(1)).to(out.x.dtype)

    if out.topk_idx.dim() == 1:
        return expert(out.topk_idx)
    assert out.topk_weights is not None
    total = torch.zeros_like(x)
    for slot in range(out.topk_idx.shape[1]):
        term = expert(out.topk_idx[:, slot]).to(wide) * out.topk_weights[:, slot].to(wide).unsqueeze(1)
        total = total + torch.where(out.topk_idx[:, slot].unsqueeze(1) >= 0, term, 0.0)
    return total.to(out.x.dtype)


def scale_moe(
    buffer: moe_ep.Buffer, own: Share, setup: Setup, **dispatch_arguments: Any
) -> tuple[Tensor, moe_ep.DispatchOutput]:
    """dispatch, scale experts, combine: (y [T, H], what dispatch gave)."""
    arguments = {"num_experts": own.num_experts, "layout": setup.layout, "alignment": setup.alignment}
    out = moe_ep.dispatch(buffer, own.x, own.idx, own.weights, **{**arguments, **dispatch_arguments})
    rows = apply_experts(out, own.scale, own.bias)
    weights = out.topk_weights if setup.layout == "expert_major" else None
    return moe_ep.combine(buffer, rows, out.handle, topk_weights=weights, exact=setup.exact), out


def loss_of(y: Tensor, dy: Tensor | None) -> Tensor:
    return y.sum() if dy is None else (y * dy.unsqueeze(1)).sum()


# -- running it -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Values over all ranks, in the order of the case's tokens and experts; None for a gradient that nobody has."""

    y: Tensor
    dx: Tensor | None
    dw: Tensor | None
    ds: Tensor | None
    db: Tensor | None
    counts: list[int]
    num_rows: list[int]  # received by each rank
    by_rank: list[dict[str, Any]]


def run_share(group: dist.ProcessGroup, case: Case, setup: Setup) -> dict[str, Any]:
    """One rank's forward and backward."""
    with open_buffer(group, setup.backend) as buffer:
        own = share(case, group, setup)
        out: list[moe_ep.DispatchOutput] = []

        def layer(x: Tensor, weights: Tensor) -> Tensor:
            y, given = scale_moe(buffer, replace(own, x=x, weights=weights), setup)
            out.append(given)
            return y

        y = with_recompute(setup.recompute, layer, own.x, own.weights)
        loss_of(y, own.dy).backward()
        # Nobody left early: the caller's group and the buffer's both still meet.
        dist.all_reduce(torch.ones(1), group=group)
        assert buffer.all_reduce(torch.ones(1)).item() == setup.world
        return collect(y, own, out[0])


def with_recompute(recompute: str, layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`layer(*inputs)`, under torch.utils.checkpoint unless `recompute` is "none"."""
    if recompute == "none":
        return layer(*inputs)
    y: Tensor = checkpoint(layer, *inputs, use_reentrant=recompute == "reentrant")
    return y


def collect(y: Tensor, own: Share, out: moe_ep.DispatchOutput) -> dict[str, Any]:
    return {
        "y": y.detach(),
        "dx": own.x.grad,
        "dw": own.weights.grad,
        "ds": own.scale.grad,
        "db": None if own.bias is None else own.bias.grad,
        "counts": out.real_tokens_per_expert,
        "num_rows": out.x.shape[0],
    }


def join(by_rank: Sequence[dict[str, Any]]) -> Outcome:
    """The ranks' results as one."""

    def cat(name: str) -> Tensor | None:
        parts = [part[name] for part in by_rank]
        return None if any(part is None for part in parts) else torch.cat(parts)

    y = cat("y")
    assert y is not None
    return Outcome(
        y=y,
        dx=cat("dx"),
        dw=cat("dw"),
        ds=cat("ds"),
        db=cat("db"),
        counts=[count for part in by_rank for count in part["counts"]],
        num_rows=[part["num_rows"] for part in by_rank],
        by_rank=list(by_rank),
    )


def run_case(ranks: Pools, case: Case, setup: Setup) -> Outcome:
    return join(ranks.run(run_share, setup.world, case, setup))


def assert_values(actual: Tensor | None, expected: Any, rtol: float = 1e-6) -> None:
    """Equal within `rtol`, zeros exactly; an expected number stands for all hidden elements of its token."""
    assert actual is not None
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    if wanted.dim() < actual.dim():
        wanted = wanted.unsqueeze(-1).expand(actual.shape)
    torch.testing.assert_close(actual.double().cpu(), wanted, rtol=rtol, atol=0.0)


def dense_values(case: Case) -> dict[str, Tensor]:
    """y, dx, dw, ds of a case without bias from the formulas at the top, in float64."""
    x, weights = case.x.double(), case.weights.double()
    dy = torch.ones(x.shape[0], dtype=torch.float64) if case.dy is None else case.dy.double()
    scale = torch.cat([case.scale.double(), torch.zeros(1, dtype=torch.float64)])[case.idx]
    gain = (weights * scale).sum(dim=1)
    inner = dy * x.sum(dim=1)
    ds = torch.zeros(case.num_experts + 1, dtype=torch.float64)
    ds.index_add_(0, case.idx.reshape(-1) % (case.num_experts + 1), (weights * inner.unsqueeze(1)).reshape(-1))
    return {
        "y": gain.unsqueeze(1) * x,
        "dx": (dy * gain).unsqueeze(1).expand_as(x),
        "dw": scale * inner.unsqueeze(1),
        "ds": ds[:-1],
    }


# -- faults -----------------------------------------------------------------------------------------------------------


def caught(call: Callable[[], object]) -> tuple[type[BaseException] | None, str]:
    """The class and the text of what `call` raises, (None, "") if it returns."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return type(error), str(error)
    return None, ""


def assert_works(buffer: moe_ep.Buffer, group: dist.ProcessGroup, setup: Setup) -> None:
    """A good round trip on a buffer, forward and backward, with the values of its formulas."""
    case = random_case([3] * setup.world, num_experts=4, num_topk=2, hidden=4, seed=7)
    own = share(case, group, setup)
    y, _ = scale_moe(buffer, own, setup)
    loss_of(y, own.dy).backward()
    mine = slice(3 * buffer.rank, 3 * buffer.rank + 3)
    values = dense_values(case)
    assert_values(y.detach(), values["y"][mine], rtol=1e-5)
    assert_values(own.x.grad, values["dx"][mine], rtol=1e-5)
    assert_values(own.weights.grad, values["dw"][mine], rtol=1e-5)


def settle(setup: Setup) -> None:
    """Until calls without a host wait have ended, so that `check` sees their faults."""
    if setup.device == "cuda":
        torch.cuda.synchronize()


def leave_nans_behind() -> None:
    """Fills blocks of memory of many sizes with NaN and frees them, so that stale memory shows."""
    blocks = [torch.full((4 << size,), float("nan")) for size in range(14) for _ in range(4)]
    blocks.clear()


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """torch.empty gives NaN (the largest number in integer tensors): PyTorch's own debug switch."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)
