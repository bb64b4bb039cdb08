"""Process groups: none, part of the world, uneven experts, W = 1, copies, forks: cases P01, P02, P04, P06, P08, P09.

P05 is in test_faults.py; P07 in test_bad_input.py, and as a whole process sees it in test_faults.py.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import moe_ep
from moe_ep.config import EPConfig, MoEConfig, RouterConfig
from tests.helpers.compare import assert_same_bits
from tests.helpers.faults import ROOT, Rank, World, run_worlds
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import (
    BACKENDS,
    LAYOUTS,
    TIMEOUT_SECS,
    Case,
    Setup,
    assert_values,
    caught,
    collect,
    dense_values,
    loss_of,
    make_case,
    mark,
    open_buffer,
    random_case,
    scale_moe,
    setups,
    share,
)

CONFIG = MoEConfig(
    hidden_size=8, ffn_hidden_size=8, num_experts=4, router=RouterConfig(topk=2), ep=EPConfig(timeout_secs=TIMEOUT_SECS)
)


def worlds(*sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("world", [pytest.param(size, marks=mark(size)) for size in sizes])


# -- P01 --------------------------------------------------------------------------------------------------------------

BARE = """
import torch
import moe_ep
import torch.distributed as dist
from moe_ep.config import EPConfig, MoEConfig, RouterConfig

assert not torch.cuda.is_initialized()
assert not dist.is_initialized()
sizes = dict(hidden_size=8, ffn_hidden_size=8, num_experts=4, router=RouterConfig(topk=2))
y = moe_ep.MoELayer(MoEConfig(**sizes, ep=EPConfig(size=1)))(torch.ones(3, 8))
assert y.shape == (3, 8)
for group in (None, dist.group.WORLD):
    try:
        moe_ep.MoELayer(MoEConfig(**sizes, ep=EPConfig(size=2)), group)
    except moe_ep.ConfigError as error:
        assert "init_process_group" in str(error)
    else:
        raise AssertionError("ep.size 2 without a process group was accepted")
assert not torch.cuda.is_initialized()
assert not dist.is_initialized()
"""


# case P01
def test_without_a_process_group_one_rank_works_and_two_are_refused() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, env=environment, check=True, timeout=60)


# case P01
def test_a_group_asked_for_before_there_is_one_is_refused_where_ranks_were_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`group.WORLD` is None until `init_process_group`: without this each rank would hold all experts, unnoticed."""
    assert dist.group.WORLD is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(moe_ep.ConfigError, match=r"WORLD_SIZE is 2, but .* call torch.distributed.init_process_group"):
        moe_ep.MoELayer(CONFIG, dist.group.WORLD)
    alone = CONFIG.model_copy(update={"ep": CONFIG.ep.model_copy(update={"size": 1})})
    assert moe_ep.MoELayer(alone).buffer.group_size == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert moe_ep.MoELayer(CONFIG).buffer.group_size == 1


# -- P02 --------------------------------------------------------------------------------------------------------------


def in_two_groups(group: dist.ProcessGroup, backend: str, layout: str) -> tuple[Tensor, Tensor | None, type | None]:
    """EP groups {0, 2} and {1, 3}, made by all ranks; then one of a single rank, and one of the others."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, others = pairs[rank % 2], pairs[1 - rank % 2]
    first, second = rank % 2, rank % 2 + 2
    case = make_case(x=[[1 + first], [1 + second]], idx=[[[3]], [[0]]], weights=[[[1]], [[1]]], num_experts=4, hidden=1)
    if rank % 2:
        open_buffer(mine, backend).close()  # the groups make different numbers of buffers
    with open_buffer(mine, backend) as buffer, open_buffer(group, backend) as of_all:
        assert (buffer.rank, buffer.group_size) == (rank // 2, 2)
        own = share(case, mine, Setup(backend, layout, 2))
        y, _ = scale_moe(buffer, own, Setup(backend, layout, 2))
        loss_of(y, None).backward()
        assert of_all.all_reduce(torch.ones(1)).item() == 4
    kind, text = caught(lambda: open_buffer(others, backend))
    assert "belongs to" in text
    alone = dist.new_group([rank], use_local_synchronization=True)
    with open_buffer(alone, backend) as buffer:
        assert (buffer.rank, buffer.group_size) == (0, 1)
    dist.barrier(group)
    for made in (mine, alone):
        dist.destroy_process_group(made)
    return y.detach(), own.scale.grad, kind


# case P02
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@worlds(4)
def test_ranks_are_those_of_the_group_not_of_the_world(ranks: Pools, backend: str, world: int, layout: str) -> None:
    results = ranks.run(in_two_groups, world, backend, layout)
    expected = [(4, [3, 0]), (8, [4, 0]), (3, [0, 1]), (4, [0, 2])]
    for (y, ds, kind), (wanted_y, wanted_ds) in zip(results, expected, strict=True):
        assert_values(y, [wanted_y])
        assert_values(ds, wanted_ds)
        assert kind is moe_ep.ConfigError


def construct_alone(group: dist.ProcessGroup, backend: str) -> str:
    """Of the ranks 1 and 3 only the first constructs its buffer."""
    pair = dist.new_group([1, 3])
    text = ""
    if dist.get_rank() == 1:
        _, text = caught(lambda: open_buffer(pair, backend, timeout_secs=1.0))
    dist.barrier(group)
    if dist.get_rank() in (1, 3):
        dist.destroy_process_group(pair)
    return text


# case P02
@pytest.mark.parametrize("backend", BACKENDS)
@worlds(4)
def test_a_missing_rank_is_named_by_its_place_in_the_world(ranks: Pools, backend: str, world: int) -> None:
    text = ranks.run(construct_alone, world, backend)[1]
    assert "the EP group of ranks [1, 3]" in text
    assert "rank 3 did not take part" in text


# -- P04 --------------------------------------------------------------------------------------------------------------


def spread_unevenly(
    group: dist.ProcessGroup, setup: Setup, num_experts: int, placement: list[int] | None
) -> dict[str, Any]:
    """A step with every expert in use."""
    with open_buffer(group, setup.backend, expert_placement=placement) as buffer:
        case = uneven_case(setup.world, num_experts)
        experts = buffer.placement(num_experts).experts_of(buffer.rank)
        own = replace(share(case, group, setup), scale=case.scale[list(experts)].requires_grad_())
        y, out = scale_moe(buffer, own, setup)
        loss_of(y, None).backward()
        return {**collect(y, own, out), "experts": experts}


def uneven_case(world: int, num_experts: int) -> Case:
    return random_case([num_experts] * world, num_experts, 2, 4)


# case P04
@pytest.mark.parametrize("explicit", [False, True], ids=["balanced", "explicit"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("world", "num_experts", "counts"),
    [
        pytest.param(2, 5, [3, 2], marks=mark(2)),
        pytest.param(8, 30, [4, 4, 4, 4, 4, 4, 3, 3], marks=mark(8)),
        pytest.param(4, 3, [1, 1, 1, 0], marks=mark(4)),
    ],
)
def test_experts_that_do_not_divide_are_each_owned_once(
    ranks: Pools, backend: str, layout: str, world: int, num_experts: int, counts: list[int], explicit: bool
) -> None:
    # Explicit: backwards and round robin, so that no rank holds a contiguous block.
    placement = [world - 1 - expert % world for expert in range(num_experts)] if explicit else None
    setup = Setup(backend, layout, world)
    parts = ranks.run(spread_unevenly, world, setup, num_experts, placement)
    assert sorted(expert for part in parts for expert in part["experts"]) == list(range(num_experts))
    if not explicit:
        assert [len(part["experts"]) for part in parts] == counts
    expected = dense_values(uneven_case(world, num_experts))
    for name in ("y", "dx", "dw"):
        assert_values(torch.cat([part[name] for part in parts]), expected[name], rtol=1e-5)
    for part in parts:
        assert_values(part["ds"], expected["ds"][list(part["experts"])], rtol=1e-5)


def layer_of_five(group: dist.ProcessGroup, backend: str, placement: list[int] | None) -> None:
    """A layer of 5 experts on 2 ranks computes what one rank computes."""
    config = CONFIG.model_copy(update={"num_experts": 5})
    x = torch.randn(4, 6, CONFIG.hidden_size)
    torch.manual_seed(1)
    alone = moe_ep.MoELayer(config)
    with open_buffer(group, backend, expert_placement=placement) as buffer:
        torch.manual_seed(1)
        layer = moe_ep.MoELayer(config, group, buffer=buffer)
        torch.testing.assert_close(layer(x[buffer.rank]), alone(x[buffer.rank]), rtol=1e-5, atol=1e-6)


# case P04
@pytest.mark.parametrize("placement", [None, [1, 0, 1, 1, 1]], ids=["balanced", "explicit"])
@pytest.mark.parametrize("backend", BACKENDS)
@worlds(2)
def test_a_layer_takes_experts_that_do_not_divide(
    ranks: Pools, backend: str, world: int, placement: list[int] | None
) -> None:
    ranks.run(layer_of_five, world, backend, placement)


# -- P06 --------------------------------------------------------------------------------------------------------------


def build_before_any_collective(rank: Rank) -> None:
    layer = moe_ep.MoELayer(CONFIG, dist.new_group([0, 1]))
    y = layer(torch.ones(3, CONFIG.hidden_size))
    y.sum().backward()
    assert y.isfinite().all()


# case P06
def test_a_layer_may_be_the_first_to_use_its_group() -> None:
    for end in run_worlds([World("first use", build_before_any_collective)])["first use"]:
        assert end.code == 0, end.text


# -- P08 --------------------------------------------------------------------------------------------------------------


def with_and_without_group(group: dist.ProcessGroup, setup: Setup) -> None:
    """The same step on a group of one rank and on none."""
    case = random_case([7], num_experts=5, num_topk=3, hidden=6)
    results = []
    for maybe in (group, None):
        with moe_ep.Buffer(maybe, backend=setup.backend) as buffer:
            assert (buffer.rank, buffer.group_size) == (0, 1)
            own = share(case, group, setup)
            y, out = scale_moe(buffer, own, setup)
            loss_of(y, None).backward()
            assert buffer.all_reduce(torch.ones(1)).item() == 1
            buffer.reset()
            results.append(collect(y, own, out))
    assert results[0]["y"].shape == (7, 6)
    expected = dense_values(case)
    for name in ("y", "dx", "dw", "ds"):
        assert_same_bits(results[0][name], results[1][name], name)
        assert_values(results[0][name], expected[name], rtol=1e-5)


# case P08; the numeric cases run at W = 1 in their own files
@setups(1)
def test_one_rank_computes_the_same_with_and_without_a_group(ranks: Pools, setup: Setup) -> None:
    for exact in (False, True) if setup.layout == "expert_major" else (False,):
        ranks.run(with_and_without_group, 1, replace(setup, exact=exact))


def layer_with_and_without_group(group: dist.ProcessGroup) -> None:
    x, results = torch.randn(2, 3, CONFIG.hidden_size), []
    for maybe in (group, None):
        torch.manual_seed(1)
        layer = moe_ep.MoELayer(CONFIG, maybe)
        y = layer(x)
        y.square().sum().backward()
        results.append([y.detach(), *(parameter.grad for parameter in layer.parameters())])
    assert results[0][0].shape == x.shape
    for i, (with_group, without) in enumerate(zip(*results, strict=True)):
        assert_same_bits(with_group, without, f"tensor {i}")


# case P08
@worlds(1)
def test_a_layer_of_one_rank_computes_the_same_with_and_without_a_group(ranks: Pools, world: int) -> None:
    ranks.run(layer_with_and_without_group, world)


# -- P09 --------------------------------------------------------------------------------------------------------------


def copy_and_pickle(group: dist.ProcessGroup) -> None:
    """An EMA copy trains apart from its model; nothing that holds a buffer is pickled; handles are."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(moe_ep.MoELayer(CONFIG, group) for _ in range(2))
    twin = copy.deepcopy(model)
    x = torch.randn(3, CONFIG.hidden_size)
    for layer, same in zip(model, twin, strict=True):
        assert same.buffer is layer.buffer
        assert same.router is not layer.router
        assert_same_bits(same(x), layer(x), "y of the copy")
        same(x).sum().backward()
        assert all(parameter.grad is None for parameter in layer.parameters())
    wholes: list[object] = [model, model[0], model[0].router, model[0].buffer]
    for whole in wholes:
        for save in (pickle.dumps, lambda thing: torch.save(thing, io.BytesIO()), copy.copy):
            if save is copy.copy and whole is not model[0].buffer:
                continue
            kind, text = caught(lambda save=save, whole=whole: save(whole))  # type: ignore[misc]
            assert kind is TypeError
            assert "state_dict()" in text
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(torch.load(file))
    assert_same_bits(twin[1](x), model[1](x), "y of the loaded copy")
    out = moe_ep.dispatch(model[0].buffer, x, torch.zeros(3, 1).long(), num_experts=4)
    handle = pickle.loads(pickle.dumps(out.handle))
    assert_same_bits(moe_ep.combine(model[0].buffer, out.x, handle), x, "y of a pickled handle")
    for layer in model:
        layer.buffer.close()


# case P09; the first part is in test_layer.py
@worlds(1, 2)
def test_models_are_copied_and_their_state_is_pickled(ranks: Pools, world: int) -> None:
    ranks.run(copy_and_pickle, world)


class Rows(Dataset[Tensor]):
    """Rows that a worker makes. It tries the layer that it inherited, and is the last to let it go."""

    def __init__(self, layer: moe_ep.MoELayer) -> None:
        self.layer: moe_ep.MoELayer | None = layer

    def __len__(self) -> int:
        return 8

    def __getitem__(self, idx: int) -> Tensor:
        if self.layer is not None:
            for call in (lambda: self.layer(torch.ones(1, 8)), self.layer.buffer.reset):  # type: ignore[misc]
                kind, text = caught(call)
                assert kind is RuntimeError
                assert "forked" in text
        self.layer = call = None
        gc.collect()
        return torch.full((CONFIG.hidden_size,), float(idx))


def fork_workers(rank: Rank) -> None:
    """Steps, forks two data workers, and steps on with what they load."""
    layer, other = moe_ep.MoELayer(CONFIG, rank.group), moe_ep.MoELayer(CONFIG, rank.group)
    for used in (layer, other):
        used(torch.ones(2, CONFIG.hidden_size)).sum().backward()
    rows = Rows(other)
    del other, used
    for _ in range(2):
        loader = DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=30)
        num_batches = 0
        for x in loader:
            layer(x).sum().backward()
            num_batches += 1
        assert num_batches == 2
    assert rows.layer is not None
    rows.layer(torch.ones(2, CONFIG.hidden_size)).sum().backward()


# case P09
def test_forked_data_workers_leave_the_exchange_alone() -> None:
    for end in run_worlds([World("workers", fork_workers)])["workers"]:
        assert not end.stuck, end.text
        assert end.code == 0, end.text
