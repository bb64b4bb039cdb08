"""`import deep_ep` answered by this package: what it finds, what it does not, and when it is refused."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import moe_ep.buffer
import moe_ep.deep_ep_v1.config
import moe_ep.event
import moe_ep.utils
from moe_ep.integrations.deep_ep import install, uninstall

ROOT = Path(__file__).parents[2]


def of_deep_ep() -> list[str]:
    return sorted(name for name in sys.modules if name.split(".")[0] in ("deep_ep", "deep_ep_cpp"))


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    assert of_deep_ep() == []
    yield
    uninstall()
    assert of_deep_ep() == []


def test_importing_the_integration_installs_nothing() -> None:
    assert "moe_ep.integrations.deep_ep" in sys.modules
    assert of_deep_ep() == []


def test_every_form_of_import_finds_the_classes_of_this_package() -> None:
    install()
    found: dict[str, object] = {}
    exec(
        "import deep_ep, deep_ep.utils, deep_ep.buffer\n"
        "from deep_ep import Buffer, Config, EventHandle, EventOverlap, topk_idx_t, utils\n"
        "from deep_ep.utils import EventHandle as Handle, EventOverlap as Overlap\n"
        "from deep_ep.buffer import Buffer as SameBuffer\n"
        "assert deep_ep.utils is utils and deep_ep.Buffer is Buffer is SameBuffer\n",
        found,
    )
    assert found["Buffer"] is moe_ep.buffer.Buffer
    assert found["Config"] is moe_ep.deep_ep_v1.config.Config
    assert found["topk_idx_t"] is moe_ep.deep_ep_v1.config.topk_idx_t
    assert found["EventHandle"] is found["Handle"] is moe_ep.event.EventHandle
    assert found["EventOverlap"] is found["Overlap"] is moe_ep.event.EventOverlap
    assert found["utils"] is moe_ep.utils


def test_install_returns_the_module_and_a_second_call_the_same() -> None:
    module = install()
    assert install() is module is importlib.import_module("deep_ep")
    assert of_deep_ep() == ["deep_ep", "deep_ep.buffer", "deep_ep.utils"]


def test_a_star_import_gives_the_public_names() -> None:
    install()
    found: dict[str, object] = {}
    exec("from deep_ep import *", found)
    assert sorted(name for name in found if name != "__builtins__") == [
        "Buffer",
        "Config",
        "EventHandle",
        "EventOverlap",
        "topk_idx_t",
    ]


def test_a_search_for_the_package_finds_it() -> None:
    # How frameworks ask whether DeepEP is there.
    install()
    assert importlib.util.find_spec("deep_ep") is not None
    assert importlib.util.find_spec("deep_ep.utils") is not None


def test_names_that_deepep_v1_does_not_have_are_missing() -> None:
    module = install()
    for name in ("HybridEPBuffer", "ElasticBuffer"):
        assert not hasattr(module, name)
        with pytest.raises(ImportError):
            exec(f"from deep_ep import {name}", {})


def test_no_module_of_this_package_is_loaded_a_second_time_under_the_other_name() -> None:
    # Two copies of moe_ep.buffer would keep two registries and two defaults of set_num_sms.
    install()
    for name in ("event", "handle", "config"):
        with pytest.raises(ModuleNotFoundError, match=f"deep_ep.{name}"):
            importlib.import_module(f"deep_ep.{name}")


@pytest.mark.parametrize("name", ["deep_ep", "deep_ep.utils", "deep_ep_cpp"])
def test_another_deep_ep_that_is_already_imported_is_refused_and_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType(name)
    other.__file__ = "/somewhere/deep_ep.py"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, name, other)
        with pytest.raises(
            RuntimeError, match=rf"^{name} is already imported, from /somewhere/deep_ep.py.*install\(\)"
        ):
            install()
        uninstall()
        assert of_deep_ep() == [name]
        assert sys.modules[name] is other


def test_uninstall_takes_back_everything_and_install_works_again() -> None:
    first = install()
    uninstall()
    assert of_deep_ep() == []
    assert importlib.util.find_spec("deep_ep") is None
    uninstall()
    second = install()
    assert second is not first
    assert second.Buffer is first.Buffer


def test_a_fresh_process_that_installs_first_runs_the_calls_that_megatron_begins_with() -> None:
    code = (
        "from moe_ep.integrations import deep_ep as door; door.install()\n"
        "from deep_ep import Buffer\n"
        "from deep_ep.utils import EventHandle, EventOverlap\n"
        "EventOverlap(EventHandle()).current_stream_wait()\n"
        "Buffer.set_num_sms(24)\n"
        "with Buffer(None, 0, 0) as buffer:\n"
        "    print(buffer.num_sms, buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.group)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["24", "0", "0", "None"]


def test_a_script_runs_on_it_without_a_changed_line(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("import deep_ep\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, neighbour\n"
        "from moe_ep.integrations.deep_ep import DeepEPModule\n"
        "assert isinstance(neighbour.deep_ep, DeepEPModule)\n"
        "print(__name__, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "moe_ep.integrations.deep_ep"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [*command, str(script), "--flag", "7"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (0, "__main__ ['--flag', '7']\n"), ran.stderr
    none = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert none.returncode == 1
    assert "Name the script to run" in none.stderr
