"""Turns pydantic's findings into sentences: the setting's path, the value, what is allowed, what to do."""

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moe_ep.config.fields import FieldKind, field_kind, required_settings, section_of, walk_settings
from moe_ep.config.problems import ConfigProblems, Problem, dotted

Path = tuple[str, ...]


def explain(error: ValidationError, model: type[BaseModel], section: Path, root: type[BaseModel]) -> list[Problem]:
    """One problem per setting that `error` complains about.

    `model` was being built and stands at path `section` below `root`, the class of a whole file.
    """
    problems: dict[Path, list[Problem]] = {}
    for details in error.errors(include_url=False):
        nested = details.get("ctx", {}).get("error")
        if isinstance(nested, ConfigProblems):
            for problem in nested.problems:
                problems.setdefault(problem.path, []).append(problem)
            continue
        owner, path = _locate(details, model, section)
        if path not in problems:  # a union reports one error per member
            problems[path] = [Problem(path, _sentence(details, owner, path, root))]
    return [problem for group in problems.values() for problem in group]


def _locate(details: ErrorDetails, model: type[BaseModel], section: Path) -> tuple[type[BaseModel], Path]:
    """The model that owns the setting, and the setting's path, without pydantic's names of union members."""
    path = section
    owner = model
    for part in details["loc"]:
        owner, path = model, (*path, str(part))
        inner = section_of(model, str(part))
        if inner is None:
            break
        model = inner
    return owner, path


def _sentence(details: ErrorDetails, owner: type[BaseModel], path: Path, root: type[BaseModel]) -> str:
    if details["type"] == "extra_forbidden":
        return unknown_setting(path, owner, root)
    field = owner.model_fields.get(path[-1]) if path else None
    if field is None:
        return f"{dotted(path) or 'the configuration'} is not valid: {details['msg']}"
    kind = field_kind(field)
    meaning = f" ({field.description})" if field.description else ""
    if details["type"] == "missing":
        where = f"under {dotted(path[:-1])}" if path[:-1] else "at the top level"
        required = required_settings(owner, path[-1])
        what = f"a section with at least {', '.join(required)}" if required else kind.describe()
        return f"{dotted(path)} is missing; add it {where}: {what}{meaning}."
    return bad_value(path, details["input"], kind, meaning)


def bad_value(path: Path, value: object, kind: FieldKind, meaning: str = "") -> str:
    """The sentence for a value that `kind` does not accept; `meaning` says what the setting is."""
    text = f"{dotted(path)} is {_show(value)}; set it to {kind.describe()}{meaning}."
    close = difflib.get_close_matches(value.lower(), kind.words, n=1) if isinstance(value, str) else []
    return f"{text} Did you mean {close[0]}?" if close else text


def _show(value: object) -> str:
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list | tuple | set):
        return "a list"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if value != "" else "empty"


def unknown_setting(path: Path, owner: type[BaseModel], root: type[BaseModel]) -> str:
    """The sentence for a key that its section does not have: the nearest valid one, or the section it belongs to."""
    return f"{dotted(path)} is not a setting. {_suggest(path[-1], path[:-1], owner, root)}"


def _suggest(key: str, section: Path, owner: type[BaseModel], root: type[BaseModel]) -> str:
    elsewhere = [path for path in walk_settings(root) if path[:-1] != section]
    spelled_here = [name for name in owner.model_fields if _plain(name) == _plain(key)]
    if spelled_here:
        return f"Did you mean {spelled_here[0]}?"
    for path in elsewhere:
        if path[-1] == key:
            return f"{key} belongs {_under(path)}."
    for path in elsewhere:  # `ep_size` is `size` of the section `ep`, `top_k` is `topk`
        if _plain(key) in (_plain(path[-1]), _plain("".join(path[-2:]))):
            return f"Did you mean {path[-1]}, which belongs {_under(path)}?"
    nearest = _nearest(key, owner.model_fields)
    if nearest is not None:
        return f"Did you mean {nearest}?"
    by_name = {path[-1]: path for path in reversed(elsewhere)}
    nearest = _nearest(key, by_name)
    if nearest is not None:
        return f"Did you mean {nearest}, which belongs {_under(by_name[nearest])}?"
    where = f"in {dotted(section)}" if section else "at the top level"
    return f"Nothing has a similar name; valid {where}: {', '.join(owner.model_fields)}."


def _under(path: Path) -> str:
    return f"under {dotted(path[:-1])}" if path[:-1] else "at the top level"


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _nearest(key: str, names: Iterable[str], cutoff: float = 0.65) -> str | None:
    """The most similar name; words are also compared sorted, so that `topk_grp` finds `group_topk`."""

    def similarity(name: str) -> float:
        lowered = key.lower().replace("-", "_")
        pairs = ((lowered, name), ("_".join(sorted(lowered.split("_"))), "_".join(sorted(name.split("_")))))
        return max(difflib.SequenceMatcher(None, left, right).ratio() for left, right in pairs)

    best = max(names, key=similarity, default=None)
    return best if best is not None and similarity(best) >= cutoff else None
