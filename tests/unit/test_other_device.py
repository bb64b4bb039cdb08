"""A buffer runs on the device that was current when it was made, whichever is current later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ep.backends.intranode import IntranodeBackend
from moe_ep.buffer import Buffer
from tests.helpers.fake_exchange import FakeNode
from tests.helpers.host_program import ROOT, run_host_program
from tests.unit.node_helpers import construct

SOURCES = ("exchange/host.cpp", "low_latency/memory.cpp", "low_latency/memory_ipc.cpp", "internode/rail.cpp")


@pytest.mark.timeout(300)
def test_no_call_of_the_runtime_depends_on_which_device_is_current(tmp_path: Path) -> None:
    sources = [ROOT / "tests/unit/other_device.cpp", *(ROOT / "csrc" / name for name in SOURCES)]
    assert run_host_program(sources, tmp_path / "other_device", "-O0") == ("", 0)


def test_what_a_buffer_hands_out_lies_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    (backend,) = construct(FakeNode().install(monkeypatch))
    assert isinstance(backend, IntranodeBackend)
    backend._device = torch.device("cuda", 3)
    buffer = Buffer.__new__(Buffer)
    buffer._backend = backend
    assert buffer._device() == torch.device("cuda", 3)
