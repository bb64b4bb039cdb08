"""The verdict of an opening between nodes: whatever the ranks say, all go or none, and each names who and what."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ep.backends.device_faults import GO
from moe_ep.backends.header import ERRORS, NUM_MATCH_WORDS, OK, OPERATIONS, Header
from moe_ep.backends.leg_faults import LegFaults
from moe_ep.backends.node_header import pack, unpack
from moe_ep.errors import ConfigError
from tests.helpers.played_kernels import told, verdict_of

COMBINE = OPERATIONS.index("combine")
NUMBER = 7  # of the opening
# What a rank may say: two calls that agree in nothing but the operation, another operation, a refusal.
SAYS = {
    "8": (Header(operation=COMBINE, hidden=8), OK),
    "16": (Header(operation=COMBINE, hidden=16, layout=1), OK),
    "dispatch": (Header(operation=OPERATIONS.index("dispatch"), hidden=8), OK),
    "refuses": (Header(operation=COMBINE), ERRORS.index(TypeError)),
}
SHAPES = [
    (2, 1, tuple(SAYS)),
    (3, 1, tuple(SAYS)),
    (1, 3, tuple(SAYS)),
    (2, 2, tuple(SAYS)),
    (3, 2, ("8", "16", "refuses")),
]


class Reasons:
    """Which rank's reason was asked for, as its reason."""

    def leave_reason(self, opening: int, text: str) -> None: ...

    def reason(self, opening: int, place: int, limit_secs: float) -> str:
        assert opening == NUMBER
        return f"reason of {place}"


def _outcomes(says: tuple[str, ...], num_nodes: int, per_node: int) -> list[tuple[bool, Exception]]:
    """Of every rank: whether it goes, and else what it is told."""
    world = num_nodes * per_node
    sent = [unpack(pack(*SAYS[word], opens=True), 1)[0] for word in says]
    outcomes = []
    for rank in range(world):
        node, own = divmod(rank, per_node)
        headers = [told(sent[rail::per_node], node, NUM_MATCH_WORDS, NUMBER) for rail in range(per_node)]
        verdict = verdict_of(headers, NUM_MATCH_WORDS)
        group = tuple(range(world))
        memory: Any = SimpleNamespace(
            exchange=None, ranks=group[node * per_node :][:per_node], rank=own, group_ranks=group
        )
        faults = LegFaults(memory)
        faults.reasons = Reasons()
        outcomes.append((verdict == GO, faults._error("a call", verdict, 0, headers)))
    return outcomes


@pytest.mark.parametrize(("num_nodes", "per_node", "words"), SHAPES, ids=lambda value: str(value)[:1])
def test_all_ranks_go_or_none_and_each_names_who_refused_or_two_that_differ(
    num_nodes: int, per_node: int, words: tuple[str, ...]
) -> None:
    num_going = 0
    for says in itertools.product(words, repeat=num_nodes * per_node):
        outcomes = _outcomes(says, num_nodes, per_node)
        goes = len(set(says)) == 1 and says[0] != "refuses"
        assert {went for went, _ in outcomes} == {goes}, says
        num_going += goes
        for rank, (_, error) in enumerate(outcomes):
            if "refuses" in says:
                assert type(error) is TypeError, says
                first = says.index("refuses")
                call = OPERATIONS[SAYS[says[rank]][0].operation]
                assert str(error) == f"EP rank {first} refused {call}: reason of {first}"
            elif not goes:
                assert type(error) is ConfigError, says
                _check_difference(says, str(error))
    assert num_going == len(set(words) - {"refuses"})


def _check_difference(says: tuple[str, ...], sentence: str) -> None:
    """The two ranks that it names have the values that it gives them."""
    found = re.search(r"disagree on (?:the )?(.+?)( H)?: rank (\d+) has (\S+), rank (\d+) has (\S+)\.", sentence)
    assert found is not None, sentence
    field = {"operation": "operation", "hidden size": "hidden"}[found[1]]
    for place, value in ((found[3], found[4]), (found[5], found[6])):
        actual = getattr(SAYS[says[int(place)]][0], field)
        assert value == (OPERATIONS[actual] if field == "operation" else str(actual)), (says, sentence)
    assert found[4] != found[6]
