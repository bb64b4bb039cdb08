"""Ranks tell each other short texts over the store: all or nobody, within the limit, and who is missing is named."""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from moe_ep.backends import node_memory
from moe_ep.backends.node_memory import Gathering
from moe_ep.errors import EPTimeoutError
from tests.helpers.fake_exchange import FakeNode
from tests.helpers.scale_experts import caught

LIMIT_SECS = 0.3
PATIENCE_SECS = 30.0  # of a wait that ends well


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_rank_gets_every_text_in_rank_order(world: int) -> None:
    node = FakeNode(world)
    texts = [f"text of {rank}, \u00e4\u00f6\u00fc" for rank in range(world)]

    def gather(rank: int) -> list[list[str]]:
        gathering = Gathering(node.store, range(world), rank)
        return [gathering.all(f"round/{i}", f"{texts[rank]} {i}", PATIENCE_SECS) for i in range(3)]

    expected = [[f"{text} {i}" for text in texts] for i in range(3)]
    assert node.run(gather) == [expected] * world


def test_nobody_leaves_before_all_have_come() -> None:
    node, order = FakeNode(2), []

    def gather(rank: int) -> None:
        if rank == 1:
            time.sleep(0.2)
            order.append("last comes")
        Gathering(node.store, (0, 1), rank).all("round", "", PATIENCE_SECS)
        order.append("leaves")

    node.run(gather)
    assert order == ["last comes", "leaves", "leaves"]


@pytest.mark.parametrize(("missing", "named"), [((1,), "rank 11"), ((0, 2), "ranks 10, 12")])
def test_the_ranks_that_stay_away_are_named_within_the_limit(missing: tuple[int, ...], named: str) -> None:
    node = FakeNode(4)

    def gather(rank: int) -> tuple[type[BaseException] | None, str]:
        if rank in missing:
            return None, ""
        return caught(lambda: Gathering(node.store, range(10, 14), rank).all("growth/7/begin", "", LIMIT_SECS))

    began = time.monotonic()
    for rank, (kind, text) in enumerate(node.run(gather)):
        if rank not in missing:
            assert kind is EPTimeoutError
            assert text == (
                "the EP group of ranks [10, 11, 12, 13] did not meet for growth within 0.3 s: "
                f"{named} did not take part. Look at their logs."
            )
    assert time.monotonic() - began < LIMIT_SECS + 10


class _LateStore:
    """A store on which the other rank arrives just after this one has looked for the last time."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.set, self.get = self.store.set, self.store.get

    def check(self, keys: list[str]) -> bool:
        if len(keys) > 1:
            return False
        self.store.set("round/1", "theirs")
        return bool(self.store.check(keys))


def test_a_rank_that_comes_just_behind_the_limit_is_not_reported_missing() -> None:
    """The others have gone on by then; a sentence that names nobody would help nobody."""
    assert Gathering(cast(c10d.Store, _LateStore()), (0, 1), 0).all("round", "mine", 0.0) == ["mine", "theirs"]


class _SilentStore:
    """A store whose process is stopped: it keeps its connections and never answers."""

    def __init__(self) -> None:
        self.wakes = threading.Event()

    def set(self, key: str, text: str) -> None:
        self.wakes.wait(60)


def test_a_store_that_does_not_answer_is_reported_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "STORE_SECS", 0.1)
    store = _SilentStore()
    kind, text = caught(lambda: Gathering(cast(c10d.Store, store), (0, 1), 0).all("reset/1/begin", "", LIMIT_SECS))
    store.wakes.set()
    assert kind is EPTimeoutError
    assert text.startswith("the EP group of ranks [0, 1] could not meet, because the store does not answer: ")
    assert "(global rank 0, or the launcher of the first node) has ended or is stopped" in text


def test_a_store_whose_process_has_ended_is_reported() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = c10d.PrefixStore("group", dist.TCPStore("127.0.0.1", server.port, is_master=False))
    gathering = Gathering(client, (0, 1), 0)
    del server
    kind, text = caught(lambda: gathering.all("growth/1/begin", "", PATIENCE_SECS))
    assert kind is EPTimeoutError
    assert "could not meet, because the store does not answer" in text
