"""The text stays true: the README's example runs, its links and names exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1, "the README has one Python example"
    return str(blocks[0])


def test_the_readme_example_runs_and_is_short() -> None:
    code = _example()
    lines = [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) <= 20
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102
    assert names["y"].shape == (64, 64)  # type: ignore[attr-defined]
    assert all(parameter.grad is not None for parameter in names["layer"].parameters())  # type: ignore[attr-defined]


def test_the_readme_shows_exactly_the_two_commands() -> None:
    commands = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["demo", "test"]
    for target in commands:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:moe_ep|layers|autograd|csrc|configs|examples|tests|benchmarks|docs)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_exist(page: Path) -> None:
    for name in set(re.findall(r"`(moe_ep(?:\.\w+)+)", page.read_text())):
        parts = name.split(".")
        found: object = importlib.import_module("moe_ep")
        for i, part in enumerate(parts[1:], start=2):
            found = getattr(found, part, None) or importlib.import_module(".".join(parts[:i]))
        assert found is not None
