"""What is wrong with a configuration: one sentence per setting, all of them in one error."""

from collections.abc import Iterable
from typing import NamedTuple

from moe_ep.errors import ConfigError


class Problem(NamedTuple):
    """One wrong setting.

    `path` is the setting's full path, for example `("moe", "router", "topk")`; `text` is the whole sentence, with the
    path in it; `place` is where the value was written (`file.yaml:12`), empty for values given in Python.
    """

    path: tuple[str, ...]
    text: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.place else self.text


class ConfigProblems(ConfigError):
    """A `ConfigError` that lists every problem found, one per line; `problems` holds them one by one."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def dotted(path: Iterable[str]) -> str:
    """("moe", "router") -> "moe.router", the form that messages and overrides use."""
    return ".".join(path)
