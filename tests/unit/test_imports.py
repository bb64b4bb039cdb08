"""The shape of the code, read from its text: imports point one way, no global state, no long file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moe_ep"

# layers -> autograd -> buffer -> backends -> csrc: a module imports from its own floor and those below.
# `checks` looks at what callers hand to a buffer before a backend sees it.
FLOORS = {"layers": 5, "autograd": 4, "buffer": 3, "checks": 3, "backends": 2, "_native": 1, "_C": 1}
FLOORS |= {"deep_ep_v1.normal_mode": 3, "low_latency": 3}  # the parts of Buffer ...
FLOORS |= {"low_latency.layout": 1}  # ... but this one is a leaf, for the backends read it too
# Every other module is a leaf (errors, config, fp8, reference ...): it imports leaves and the kernels only ...
LEAF_FLOOR = 1
# ... except what stands above the layers: it imports everything, and nothing below imports it.
ROOF = {"", "cli", "doctor", "integrations", "__main__"}
ROOF_FLOOR = 6
# ... but this integration is a package that we call, not one that calls us: a leaf.
LEAVES_IN_THE_ROOF = {"moe_ep.integrations", "moe_ep.integrations.transformer_engine"}


def floor_of(module: str) -> int:
    """The floor of a module by its dotted name, which begins with moe_ep."""
    if module in LEAVES_IN_THE_ROOF:
        return LEAF_FLOOR
    parts = module.split(".")[1:3] or [""]
    return ROOF_FLOOR if parts[0] in ROOF else FLOORS.get(".".join(parts), FLOORS.get(parts[0], LEAF_FLOOR))


def module_names() -> dict[str, Path]:
    """Every module of the package by dotted name, the symlinked folders included."""
    names = {}
    # Path.rglob does not follow symlinks before Python 3.13.
    for folder in (PACKAGE, PACKAGE / "layers", PACKAGE / "autograd"):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(source: str, module: str, is_package: bool, modules: set[str]) -> set[str]:
    """The modules of moe_ep that a source text imports anywhere, inside functions and type checks too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join(package[: len(package) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                # `from moe_ep import errors` names a module, `from moe_ep import Buffer` names the package.
                submodule = f"{base}.{alias.name}"
                found.add(submodule if submodule in modules or submodule == "moe_ep._C" else base)
    return {name for name in found if name == "moe_ep" or name.startswith("moe_ep.")}


def upward_imports(module: str, imports: set[str]) -> list[str]:
    own = floor_of(module)
    return [f"{module} imports {name}" for name in sorted(imports) if floor_of(name) > own]


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for suffix in ("py", "cpp", "cu", "cuh", "h"):
            yield from sorted((ROOT / folder).rglob(f"*.{suffix}"))


def test_imports_point_one_way() -> None:
    modules = module_names()
    assert "moe_ep.errors" in modules
    wrong = []
    for name, path in modules.items():
        imports = imports_of(path.read_text(), name, path.name == "__init__.py", set(modules))
        wrong += upward_imports(name, imports)
    assert not wrong, "Imports point layers -> autograd -> buffer -> backends -> csrc; these go up: " + "; ".join(wrong)


@pytest.mark.parametrize(
    ("module", "line", "is_upward"),
    [
        ("moe_ep.layers.moe", "from moe_ep.autograd.dispatch import dispatch", False),
        ("moe_ep.layers.moe", "from moe_ep import errors", False),
        ("moe_ep.layers.moe", "from moe_ep import MoELayer", True),
        ("moe_ep.autograd.dispatch", "from moe_ep.layers import moe", True),
        ("moe_ep.autograd.dispatch", "from ..buffer import Buffer", False),
        ("moe_ep.backends.torch_dist", "from ..buffer import Buffer", True),
        ("moe_ep.backends.torch_dist", "def f():\n    import moe_ep.buffer", True),
        ("moe_ep.backends.intranode", "from moe_ep import _C, _native", False),
        ("moe_ep.fp8.cast", "from moe_ep import _native", False),
        ("moe_ep.errors", "from . import backends", True),
        ("moe_ep.cli", "import moe_ep.layers.moe, moe_ep", False),
    ],
)
def test_the_import_check_sees_upward_imports_and_only_those(module: str, line: str, is_upward: bool) -> None:
    modules = {"moe_ep.errors", "moe_ep.buffer", "moe_ep.backends", "moe_ep._native", "moe_ep.layers.moe"}
    assert bool(upward_imports(module, imports_of(line, module, False, modules))) == is_upward


def test_no_file_uses_the_global_statement() -> None:
    for path in sources("moe_ep", "layers", "autograd"):
        if path.suffix == ".py":
            lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Global)]
            assert not lines, f"{path.relative_to(ROOT)} uses `global` in lines {lines}: put the state into an object."


def test_no_file_has_more_than_500_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): num_lines
        for path in sources("moe_ep", "layers", "autograd", "csrc", "examples", "benchmarks", "tests")
        if (num_lines := len(path.read_text().splitlines())) > 500
    }
    assert not long, f"The limit is 500 lines a file, split these by idea: {long}"


def test_csrc_includes_no_torch_header() -> None:
    for path in sources("csrc"):
        includes = [line for line in path.read_text().splitlines() if line.lstrip().startswith("#include")]
        wrong = [line for line in includes if any(word in line for word in ("torch", "ATen", "c10"))]
        assert not wrong, f"{path.relative_to(ROOT)} would bind the extension to one PyTorch version: {wrong}"


def test_the_checks_read_the_folders_behind_the_symlinks() -> None:
    for name in ("layers", "autograd"):
        link = PACKAGE / name
        assert link.is_symlink(), f"moe_ep/{name} is not a symlink to ../{name}: make it one again."
        assert link.resolve() == ROOT / name
