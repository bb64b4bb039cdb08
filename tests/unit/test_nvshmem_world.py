"""NVSHMEM is begun once a process, over the ranks of an EP group, from one unique id; closed rails are used again."""

from __future__ import annotations

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep.backends import nvshmem_world
from moe_ep.backends.node_memory import Gathering
from moe_ep.backends.nvshmem_world import NvshmemWorld, Watched, why_no_nvshmem
from moe_ep.errors import ConfigError

WATCHED = Watched(8, 16, 1.0)


@dataclass
class UniqueId:
    """Travels by pickle, as nvshmem4py's does."""

    text: str


@dataclass
class FakeNvshmem:
    """What is asked of nvshmem4py and of our extension."""

    inits: list[dict[str, Any]] = field(default_factory=list)
    num_ids: int = 0
    num_registered: int = 0
    rails: list[SimpleNamespace] = field(default_factory=list)

    def get_unique_id(self) -> UniqueId:
        self.num_ids += 1
        return UniqueId(f"id {self.num_ids}")

    def init(self, **arguments: Any) -> None:
        self.inits.append(arguments)

    def register_kernels(self) -> None:
        assert len(self.inits) > self.num_registered, "kernels are registered behind the initialisation"
        self.num_registered += 1

    def NvshmemRail(self, **arguments: Any) -> SimpleNamespace:  # noqa: N802 (a class)
        rail = SimpleNamespace(**arguments)
        rail.watch = lambda **watched: vars(rail).update(watched)
        self.rails.append(rail)
        return rail


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvshmem:
    fake = FakeNvshmem()
    device = SimpleNamespace(set_current=lambda: None)
    modules = {"nvshmem.core": fake, "cuda.core": SimpleNamespace(Device=lambda number: device)}
    monkeypatch.setattr(nvshmem_world.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(nvshmem_world, "load_nvshmem", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return fake


def _start(num_ranks: int) -> list[NvshmemWorld]:
    """One world a thread, as if each were a process."""
    store, worlds = dist.HashStore(), [NvshmemWorld() for _ in range(num_ranks)]

    def begin(rank: int) -> None:
        worlds[rank].start(Gathering(store, range(4, 4 + num_ranks), rank), 10)

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return worlds


def test_all_ranks_begin_with_the_id_of_the_first_and_their_place_in_the_group(fake: FakeNvshmem) -> None:
    _start(3)
    assert fake.num_ids == 1
    assert {given["uid"].text for given in fake.inits} == {"id 1"}
    assert sorted(given["rank"] for given in fake.inits) == [0, 1, 2]
    assert {(given["nranks"], given["initializer_method"]) for given in fake.inits} == {(3, "uid")}
    assert fake.num_registered == 3


def test_a_process_begins_once_and_refuses_another_group(fake: FakeNvshmem) -> None:
    (world,) = _start(1)
    world.start(Gathering(dist.HashStore(), [4], 0), 10)
    assert len(fake.inits) == 1
    with pytest.raises(ConfigError, match=r"over ranks \[4\] already.*the EP group has ranks \[5\]"):
        world.start(Gathering(dist.HashStore(), [5], 0), 10)


def test_a_process_begins_on_one_device(fake: FakeNvshmem, monkeypatch: pytest.MonkeyPatch) -> None:
    (world,) = _start(1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with pytest.raises(ConfigError, match="on device 0 already, but device 3 is current: call torch.cuda.set_device"):
        world.start(Gathering(dist.HashStore(), [4], 0), 10)


def _rails(worlds: list[NvshmemWorld], flow_bytes: int, watched: Watched = WATCHED) -> list[Any]:
    """What every rank gets, on a store that only this rail has."""
    store, ranks = dist.HashStore(), range(4, 4 + len(worlds))

    def rail(rank: int) -> Any:
        return worlds[rank].rail(Gathering(store, ranks, rank), 10, 0, [0, 2], flow_bytes, watched)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(rail, range(len(worlds))))


def test_a_closed_rail_serves_the_next_buffer_of_its_shape(fake: FakeNvshmem) -> None:
    worlds = _start(1)
    (world,) = worlds
    (first,), (second,) = _rails(worlds, 512), _rails(worlds, 512)
    assert len(fake.rails) == 2
    world.give_back(first)
    assert _rails(worlds, 1024) != [first]
    (again,) = _rails(worlds, 512, Watched(24, 32, 5.0))
    assert again is first
    assert (fake.rails[0].node_state, fake.rails[0].record, fake.rails[0].timeout_secs) == (24, 32, 5.0)
    assert len(fake.rails) == 3
    world.give_back(second)
    world.give_back(second)  # a second close
    assert _rails(worlds, 512) == [second]
    assert _rails(worlds, 512) != [second]
    assert len(fake.rails) == 4


def test_ranks_that_closed_in_another_order_or_less_take_the_same_memory_again(fake: FakeNvshmem) -> None:
    worlds = _start(2)
    rails = [_rails(worlds, 512) for _ in range(3)]
    for rank, closes in enumerate([(2, 0, 1), (1, 2)]):
        for number in closes:
            worlds[rank].give_back(rails[number][rank])
    for number in (1, 2):
        for ours, theirs in zip(_rails(worlds, 512), rails[number], strict=True):
            assert ours is theirs
    assert len(fake.rails) == 6
    _rails(worlds, 512)  # rank 0 has one more, which rank 1 still uses
    assert len(fake.rails) == 8


@pytest.mark.parametrize("missing", ["nvshmem", "cuda", "moe_ep._C_nvshmem"])
def test_what_is_missing_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    found = {name: None if name == missing else object() for name in ("nvshmem", "cuda", "moe_ep._C_nvshmem")}
    monkeypatch.setattr(importlib.util, "find_spec", found.__getitem__)
    sentence = why_no_nvshmem()
    assert ("moe_ep again" in sentence) == (missing == "moe_ep._C_nvshmem")
    assert ("pip install nvshmem4py-cu13" in sentence) == (missing != "moe_ep._C_nvshmem")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert why_no_nvshmem() == ""


def test_nothing_is_imported_before_it_is_used() -> None:
    assert "nvshmem" not in sys.modules
    assert "moe_ep._C_nvshmem" not in sys.modules
