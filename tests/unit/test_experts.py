"""Grouped experts: values, gradients of unrouted experts, dtypes, initial values, names in checkpoints."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.config import MoEConfig, RouterConfig
from moe_ep.layers.experts import GroupedExperts

H, F = 4, 3


def make_experts(num_experts: int = 4, ids: list[int] | None = None, activation: Any = "swiglu") -> GroupedExperts:
    config = MoEConfig(
        hidden_size=H,
        ffn_hidden_size=F,
        num_experts=num_experts,
        activation=activation,
        init_std=0.5,
        router=RouterConfig(topk=1),
    )
    return GroupedExperts(config, list(range(num_experts)) if ids is None else ids)


def plain_expert(row: list[float], first: list[list[float]], down: list[list[float]], activation: str) -> list[float]:
    """Oracle in Python floats: one row through one expert."""
    projected = [sum(a * b for a, b in zip(row, weights, strict=True)) for weights in first]
    if activation == "gelu":
        inner = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in projected]
    else:
        gate, up = projected[:F], projected[F:]
        inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
    return [sum(a * b for a, b in zip(inner, weights, strict=True)) for weights in down]


def dirty_memory() -> None:
    for _ in range(4):
        torch.full((4096,), math.nan)


def dense_double(experts: GroupedExperts, rows: Tensor, sizes: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Oracle for gradients: float64, one expert after the other, each with its own leaf weights."""
    leaves = {
        (name, local): parameter[local].detach().double().requires_grad_()
        for name, parameter in experts.named_parameters()
        for local in range(len(sizes))
    }
    pieces, start = [], 0
    for local, size in enumerate(sizes):
        piece = rows[start : start + size].double()
        start += size
        if experts.activation == "gelu":
            inner = torch.nn.functional.gelu(piece @ leaves["up", local].T)
        else:
            projected = piece @ leaves["gate_up", local].T
            inner = torch.sigmoid(projected[:, :F]) * projected[:, :F] * projected[:, F:]
        pieces.append(inner @ leaves["down", local].T)
    out = torch.cat(pieces)
    (out * torch.arange(1, out.numel() + 1).view_as(out)).sum().backward()
    grads = {}
    for name, parameter in experts.named_parameters():
        per_expert = [leaves[name, local].grad for local in range(len(sizes))]
        grads[name] = torch.stack([torch.zeros(parameter.shape[1:]) if grad is None else grad for grad in per_expert])
    return out, grads


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_each_expert_transforms_its_own_rows(activation: str) -> None:
    torch.manual_seed(0)
    experts = make_experts(activation=activation)
    first = experts.get_parameter("gate_up" if activation == "swiglu" else "up")
    assert first.shape == (4, 2 * F if activation == "swiglu" else F, H)
    assert experts.down.shape == (4, H, F)
    rows = torch.randn(6, H)
    owner = [0, 0, 0, 2, 3, 3]
    out = experts(rows, [3, 0, 1, 2])
    for row, expert in enumerate(owner):
        expected = plain_expert(rows[row].tolist(), first[expert].tolist(), experts.down[expert].tolist(), activation)
        torch.testing.assert_close(out[row], torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [[0, 3, 0, 2, 0], [2, 0, 0, 0, 3], [0, 0, 5, 0, 0], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_experts_without_rows_get_gradients_of_exactly_zero(sizes: list[int], activation: str) -> None:
    """Cases E02, E03, E06: the expert's own part; twice, over memory full of NaN."""
    torch.manual_seed(0)
    experts = make_experts(5, activation=activation)
    rows = torch.randn(sum(sizes), H)
    expected, expected_grads = dense_double(experts, rows, sizes)
    for _ in range(2):
        experts.zero_grad(set_to_none=True)
        dirty_memory()
        out = experts(rows, sizes)
        (out * torch.arange(1, out.numel() + 1).view_as(out)).sum().backward()
        torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)
        for name, parameter in experts.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected_grads[name].float(), rtol=1e-4, atol=1e-4)
            for local, size in enumerate(sizes):
                if size == 0:
                    assert (parameter.grad[local] == 0).all()


@pytest.mark.parametrize("sizes", [[2, 3, 1], [0, 6, 0], [0, 0, 0]])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("by_offsets", [False, True])
def test_weights_inside_are_weights_behind(sizes: list[int], activation: str, by_offsets: bool) -> None:
    """A row's weight between the projections does what it does to the result, with the same gradients; case G01."""
    torch.manual_seed(0)
    experts = make_experts(3, activation=activation).double()
    rows = torch.randn(sum(sizes), H, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(sum(sizes), dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    leaves = [rows, weights, *experts.parameters()]
    inside = experts(rows, None if by_offsets else sizes, offsets, weights)
    behind = experts(rows, sizes) * weights[:, None]
    torch.testing.assert_close(inside, behind, rtol=1e-12, atol=1e-14)
    grad = torch.randn_like(behind)
    for ours, theirs in zip(
        torch.autograd.grad(inside, leaves, grad), torch.autograd.grad(behind, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_weights_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(ValueError, match=r"row_weights_R has shape \[2\], but there are 3 rows"):
        make_experts(2)(torch.zeros(3, H), [3, 0], row_weights_R=torch.ones(2))


def test_weight_decay_reaches_unrouted_experts() -> None:
    """Case E03: an expert weight of 4.0 without tokens becomes 3.96 in one AdamW step (lr 0.1, decay 0.1)."""
    experts = make_experts(2)
    with torch.no_grad():
        experts.down[1].fill_(4.0)
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1, weight_decay=0.1)
    experts(torch.randn(3, H), [3, 0]).sum().backward()
    optimizer.step()
    torch.testing.assert_close(experts.down[1], torch.full((H, F), 3.96))


def test_a_rank_without_experts_keeps_its_output_attached() -> None:
    """Case E02 for uneven experts (case P04): L = 0."""
    experts = make_experts(ids=[])
    rows = torch.zeros(0, H, requires_grad=True)
    out = experts(rows, [])
    assert out.shape == (0, H)
    out.sum().backward()
    assert rows.grad is not None
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
    assert experts.state_dict() == {}


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_keeps_the_dtype_of_rows_and_gradients(rows_dtype: torch.dtype, backward_inside: bool) -> None:
    """Case N02."""
    torch.manual_seed(0)
    experts = make_experts()
    rows = torch.randn(5, H).to(rows_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(rows, [2, 0, 1, 2])
        assert out.dtype == rows_dtype
        if backward_inside:
            out.sum().backward()
    if not backward_inside:
        out.sum().backward()
    assert rows.grad is not None
    assert rows.grad.dtype == rows_dtype
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), experts(rows.float(), [2, 0, 1, 2]), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [
        (torch.zeros(5, H), [1, 1, 1, 1], "sums to 4, but there are 5 rows"),
        (torch.zeros(5, H), [5], "holds 1 counts .* has 4 experts"),
        (torch.zeros(5, H), [6, -1, 0, 0], "holds 4 counts"),
        (torch.zeros(5, H + 1), [5, 0, 0, 0], r"\[5, 5\], but the experts take \[rows, 4\]"),
        (torch.zeros(5, H, dtype=torch.bfloat16), [5, 0, 0, 0], "bfloat16, but the experts are torch.float32"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_both_numbers(rows: Tensor, sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_experts()(rows, sizes)


@pytest.mark.parametrize("ids", [[0, 4], [1, 1], [-1]])
def test_impossible_expert_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="distinct ids from 0 to 3"):
        make_experts(ids=ids)


@pytest.mark.parametrize("ids", [[0, 1], [2, 3], [3], []])
def test_initial_values_and_the_default_generator_do_not_depend_on_the_placement(ids: list[int]) -> None:
    torch.manual_seed(5)
    everything = make_experts()
    next_draw = torch.rand(3)
    torch.manual_seed(5)
    part = make_experts(ids=ids)
    assert torch.equal(torch.rand(3), next_draw)
    for name, parameter in part.named_parameters():
        for local, expert_id in enumerate(ids):
            assert torch.equal(parameter[local], everything.get_parameter(name)[expert_id])


def test_experts_start_different_and_with_the_asked_spread() -> None:
    config = MoEConfig(hidden_size=64, ffn_hidden_size=64, num_experts=4, init_std=0.02, router=RouterConfig(topk=1))
    experts = GroupedExperts(config, range(4))
    for parameter in experts.parameters():
        assert abs(parameter.std().item() - 0.02) < 1e-3
        assert abs(parameter.mean().item()) < 1e-3
        assert not torch.equal(parameter[0], parameter[1])


def test_the_data_parallel_mark_survives_copies_casts_and_loading() -> None:
    experts = make_experts()
    copies: list[torch.nn.Module] = [
        experts,
        copy.deepcopy(experts),
        copy.deepcopy(torch.nn.ModuleList([experts])),
        pickle.loads(pickle.dumps(experts)),
        copy.deepcopy(experts).bfloat16(),
    ]
    with torch.device("meta"):
        on_meta = make_experts()
    copies.append(copy.deepcopy(on_meta).to_empty(device="cpu"))
    on_meta.load_state_dict(experts.state_dict(), assign=True)
    copies.append(on_meta)
    for module in copies:
        parameters = list(module.parameters())
        assert len(parameters) == 2
        assert all(parameter.allreduce is False for parameter in parameters)  # type: ignore[attr-defined]
    assert torch.equal(on_meta.down, experts.down)
    with torch.no_grad():
        copies[1].get_parameter("down").zero_()
    assert not (experts.down == 0).any()


def numbered(experts: GroupedExperts) -> GroupedExperts:
    with torch.no_grad():
        for parameter in experts.parameters():
            for local, expert_id in enumerate(experts.expert_ids):
                parameter[local].fill_(expert_id + 1)
    return experts


def test_checkpoint_names_experts_globally_and_loads_at_any_number_of_ranks() -> None:
    """Case M01: saved by two ranks, loaded by 1, 2 and 4; local expert j holds global id + 1."""
    merged: dict[str, Tensor] = {}
    for ids in ([0, 1], [2, 3]):
        state = numbered(make_experts(ids=ids)).state_dict(prefix="experts.")
        assert set(state) == {f"experts.{expert}.{name}" for expert in ids for name in ("gate_up", "down")}
        merged.update(state)
    stream = io.BytesIO()
    torch.save(merged, stream)
    stream.seek(0)
    loaded = torch.load(stream)
    reference = numbered(make_experts())
    rows = torch.randn(4, H)
    expected = reference(rows, [1, 1, 1, 1])
    for placement in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 0], [1, 2]], [[], [0, 1, 2, 3]]):
        for ids in placement:
            holder = torch.nn.ModuleDict({"experts": make_experts(ids=ids)})
            holder.load_state_dict(loaded, strict=True)
            part = holder["experts"]
            for parameter in part.parameters():
                for local, expert_id in enumerate(ids):
                    assert (parameter[local] == expert_id + 1).all()
            assert torch.equal(part(rows[ids], [1] * len(ids)), expected[ids])


def test_state_dict_entries_are_views_of_the_parameters() -> None:
    experts = make_experts(ids=[2, 1])
    state = experts.state_dict()
    assert not state["2.down"].requires_grad
    state["1.down"].fill_(7.0)
    assert (experts.down[1] == 7.0).all()
    assert experts.state_dict(keep_vars=True)["2.down"].requires_grad


def test_loading_casts_to_the_dtype_of_the_parameters() -> None:
    state = numbered(make_experts()).bfloat16().state_dict()
    experts = make_experts()
    experts.load_state_dict(state)
    assert experts.down.dtype == torch.float32
    assert (experts.down[3] == 4.0).all()


def broken_states() -> dict[str, tuple[dict[str, Any], str]]:
    full = numbered(make_experts()).state_dict()
    without = {key: value for key, value in full.items() if not key.startswith("3.")}
    eight = numbered(make_experts(8)).state_dict()
    return {
        "one expert missing": (without, "3.gate_up"),
        "one tensor missing": ({key: value for key, value in full.items() if key != "2.down"}, "2.down"),
        "too many experts": (eight, "7.down"),
        "stacked names": ({"gate_up": torch.zeros(4, 2 * F, H), "down": torch.zeros(4, H, F)}, "0.down"),
        "unknown name": ({**full, "0.bias": torch.zeros(3)}, "0.bias"),
        "padded id": ({**without, "03.gate_up": full["3.gate_up"], "03.down": full["3.down"]}, "03.down"),
        "wrong shape": ({**full, "1.down": torch.zeros(H, F + 1)}, "size mismatch for 1.down"),
        "no tensor": ({**full, "1.down": "text"}, "1.down is str"),
    }


@pytest.mark.parametrize("name", list(broken_states()))
def test_a_state_dict_that_does_not_fit_changes_nothing_and_is_named(name: str) -> None:
    """Case M05."""
    state, message = broken_states()[name]
    experts = make_experts()
    before = {key: value.clone() for key, value in experts.state_dict().items()}
    with pytest.raises(RuntimeError, match=message):
        experts.load_state_dict(state, strict=True)
    for key, value in experts.state_dict().items():
        assert torch.equal(value, before[key])
    assert not experts.check_state_dict(state).fits()


def test_half_of_the_experts_is_an_error_without_strict_too_but_none_at_all_is_not() -> None:
    """Case M01: never a silent skip."""
    experts = make_experts()
    half = {key: value for key, value in experts.state_dict().items() if int(key[0]) < 2}
    with pytest.raises(RuntimeError, match="left unchanged: 4 names are missing"):
        experts.load_state_dict(half, strict=False)
    result = experts.load_state_dict({}, strict=False)
    assert sorted(result.missing_keys) == sorted(experts.state_dict())


def test_experts_of_other_ranks_in_the_file_are_ignored() -> None:
    full = numbered(make_experts()).state_dict()
    part = make_experts(ids=[1])
    part.load_state_dict(full, strict=True)
    assert (part.down == 2.0).all()
    only_foreign = {key: value for key, value in full.items() if key.startswith("0.")}
    with pytest.raises(RuntimeError, match=r"1\.down"):
        part.load_state_dict(only_foreign, strict=True)
