"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One sentence about one part of the machine.

    Attributes:
        subject: the part; requirements name it.
        state: "warning" works and costs something, "missing" is not there, "broken" is there and does not work.
        sentence: what was found, without a full stop.
        fix: what to do; empty where all is well.
    """

    subject: str
    state: State
    sentence: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert (self.state == "ok") == (self.fix == ""), f"{self}: what is not well has a fix, and nothing else"

    @property
    def works(self) -> bool:
        return self.state in ("ok", "warning")
