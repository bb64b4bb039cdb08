"""`install()`: `import deep_ep` answers with this package, for a framework that imports DeepEP V1 by its own name.

The module put in its place carries DeepEP V1's public names and no others, so that a framework that looks for more
(`HybridEPBuffer`, `ElasticBuffer`) finds it missing, as in a DeepEP without it.

A script runs so without a changed line: `torchrun ... -m moe_ep.integrations.deep_ep script.py ...`.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from moe_ep import buffer, utils
from moe_ep.buffer import Buffer
from moe_ep.deep_ep_v1.config import Config, topk_idx_t
from moe_ep.event import EventHandle, EventOverlap

_NAME = "deep_ep"
# What `import deep_ep.NAME` gives. The module has no path, so nothing else of this package is loaded a second time.
_SUBMODULES = {"buffer": buffer, "utils": utils}
_NAMES = {
    "Buffer": Buffer,
    "Config": Config,
    "EventHandle": EventHandle,
    "EventOverlap": EventOverlap,
    "topk_idx_t": topk_idx_t,
}


class DeepEPModule(ModuleType):
    """The module that stands in for `deep_ep`."""

    def __init__(self) -> None:
        super().__init__(_NAME, "DeepEP V1's Buffer and what belongs to it, answered by moe_ep.")
        # importlib.util.find_spec, by which frameworks look for DeepEP, raises where a loaded module has no spec.
        self.__spec__ = ModuleSpec(_NAME, loader=None, origin="moe_ep", is_package=True)
        self.__path__: list[str] = []
        self.__all__ = sorted(_NAMES)
        self.__dict__.update(_NAMES, **_SUBMODULES)


def install() -> ModuleType:
    """Makes `import deep_ep`, `deep_ep.utils` and `deep_ep.buffer` answer with this package, in this process.

    Call it before importing the framework: a module that has already looked for `deep_ep` has taken its decision. An
    installed DeepEP that nothing has imported yet is hidden. A second call changes nothing.

    Returns:
        The module that `import deep_ep` now gives.

    Raises:
        RuntimeError: another `deep_ep` has been imported already.
    """
    present = sys.modules.get(_NAME)
    if isinstance(present, DeepEPModule):
        return present
    foreign = sorted(name for name, module in sys.modules.items() if module is not None and _is_deep_ep(name))
    if foreign:
        origin = getattr(sys.modules[foreign[0]], "__file__", None) or "an unknown place"
        raise RuntimeError(
            f"{foreign[0]} is already imported, from {origin}, and whoever imported it would keep it; call "
            "moe_ep.integrations.deep_ep.install() before the first import of deep_ep or of a framework that uses it."
        )
    module = DeepEPModule()
    sys.modules[_NAME] = module
    sys.modules.update({f"{_NAME}.{name}": submodule for name, submodule in _SUBMODULES.items()})
    return module


def uninstall() -> None:
    """Takes back what `install()` did; does nothing where it did nothing.

    Modules that imported names from `deep_ep` in between keep them.
    """
    if isinstance(sys.modules.get(_NAME), DeepEPModule):
        for name in [_NAME, *(f"{_NAME}.{name}" for name in _SUBMODULES)]:
            sys.modules.pop(name, None)


def _is_deep_ep(name: str) -> bool:
    return name in (_NAME, "deep_ep_cpp") or name.startswith(f"{_NAME}.")


def run_script(arguments: list[str]) -> None:
    """Runs a Python script as `python script.py ...` would, after `install()`.

    Args:
        arguments: the script's path and its arguments.

    Raises:
        SystemExit: no script was named, or what the script raises itself.
    """
    if not arguments:
        sys.exit("Name the script to run: python -m moe_ep.integrations.deep_ep SCRIPT [ARGUMENT ...].")
    install()
    sys.argv[:] = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    from moe_ep.integrations import deep_ep  # this file under its own name: as `__main__` it is another module

    deep_ep.run_script(sys.argv[1:])
