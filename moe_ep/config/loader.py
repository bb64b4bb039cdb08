"""A YAML file -> `Config`, with the file, line and path of every setting that is wrong, all in one error.

The file is read as a tree of nodes, not as Python values: nodes know their line and keep the text as written, so the
fields decide the types (see `moe_ep.config.scalars`), a key given twice is seen, and no tag can build an object.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import BaseModel

from moe_ep.config.checks import world_size_problems
from moe_ep.config.fields import field_kind, required_settings, section_of
from moe_ep.config.problems import ConfigProblems, Problem, dotted
from moe_ep.config.scalars import parse_scalar, substitute
from moe_ep.config.schema import MAX_INT, Config

SettingPath = tuple[str, ...]

_PLAIN_TAGS = {yaml.ScalarNode: "str", yaml.SequenceNode: "seq", yaml.MappingNode: "map"}
_NODE_NAMES = {yaml.ScalarNode: "a single value", yaml.SequenceNode: "a list", yaml.MappingNode: "a map"}


def load_config(
    path: str | os.PathLike[str],
    overrides: Mapping[str, str] | None = None,
    world_size: int | None = None,
) -> Config:
    """Read a configuration file.

    Args:
        path: a YAML file with the section `moe` and optionally `model` and `train`. In every value `${NAME}` and
            `${NAME:default}` stand for environment variables. A file that is empty is an error, not all defaults.
        overrides: full path of a setting -> its text, as in a file, e.g. `{"moe.router.topk": "2"}`; they win over the
            file and are checked like it.
        world_size: number of ranks that `moe.ep.size` must divide; None = the environment variable WORLD_SIZE if it is
            set, and else no such check.

    Raises:
        ConfigError: with one line per problem, each naming file, line, the setting's path, the value, what is allowed
            and what to do.
    """
    reader = _Reader(str(path))
    root = _compose(Path(path))
    values = reader.read_root(root)
    for key, text in (overrides or {}).items():
        reader.override(values, key, str(text))
    config = reader.build(values)
    ranks = _world_size(world_size)
    problems = world_size_problems(config, ranks) if ranks is not None else []
    if problems:
        raise ConfigProblems(reader.placed(problems))
    return config


def _compose(path: Path) -> yaml.Node:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text ({error.reason})"
        raise _file_error(
            str(path), f"the configuration file cannot be read: {reason}. Give the path of a YAML file."
        ) from error
    try:
        node = yaml.compose(content, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        story = ": ".join(part for part in (error.context, error.problem) if part)
        raise _file_error(place, f"not valid YAML: {story}. Check the indentation and colons here.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise _file_error(str(path), f"not valid YAML: {' '.join(str(error).split())}.") from error
    if node is None:
        sections = ", ".join(Config.model_fields)
        text = (
            f"the file is empty; it needs the section moe with at least {', '.join(required_settings(Config, 'moe'))} "
            f"(all sections: {sections})."
        )
        raise _file_error(str(path), text)
    return node


def _file_error(place: str, text: str) -> ConfigProblems:
    """A problem that belongs to no setting."""
    return ConfigProblems([Problem((), text, place)])


def _world_size(given: int | None) -> int | None:
    text = os.environ.get("WORLD_SIZE") if given is None else str(given)
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_INT:
        origin = "world_size" if given is not None else "the environment variable WORLD_SIZE"
        raise _file_error("", f"{origin} is {text}; set it to an integer from 1 to {MAX_INT} (the number of ranks).")
    return int(text)


class _Reader:
    """Collects the values of one file and its overrides, where each was written, and what is wrong so far."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[SettingPath, str] = {(): file}
        self.problems: list[Problem] = []
        self.unset: dict[SettingPath, Problem] = {}  # settings whose text needs a variable that is not there

    def read_root(self, node: yaml.Node) -> dict[str, object]:
        if not isinstance(node, yaml.MappingNode):
            text = f"the file holds {_NODE_NAMES[type(node)]}; it must be a map of {', '.join(Config.model_fields)}."
            raise _file_error(self._place(node), text)
        return self._read_section(node, Config, ())

    def _read_section(self, node: yaml.MappingNode, model: type[BaseModel], path: SettingPath) -> dict[str, object]:
        values: dict[str, object] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                kind, section = _NODE_NAMES[type(key_node)], dotted(path) or "the file"
                text = f"{section} has {kind} as a key; write the name of a setting."
                self.problems.append(Problem(path, text, self._place(key_node)))
                continue
            key = key_node.value
            inner = (*path, key)
            if key in first_lines:
                text = f"{dotted(inner)} is given twice, first in line {first_lines[key]}. Keep one of the two."
                self.problems.append(Problem(inner, text, self._place(key_node)))
                continue
            first_lines[key] = line
            self.places[inner] = self._place(key_node)
            self._read_value(value_node, model, inner, values)
        return values

    def _read_value(
        self, node: yaml.Node, model: type[BaseModel], path: SettingPath, values: dict[str, object]
    ) -> None:
        if node.tag != f"tag:yaml.org,2002:{_PLAIN_TAGS[type(node)]}":
            text = f"{dotted(path)} has the tag {node.tag}; the setting itself decides its type. Remove the tag."
            self.problems.append(Problem(path, text, self.places[path]))
            return
        section = section_of(model, path[-1])
        if isinstance(node, yaml.ScalarNode):
            self._read_text(node.value, model, path, values, quoted=node.style is not None)
        elif isinstance(node, yaml.MappingNode) and section is not None:
            values[path[-1]] = self._read_section(node, section, path)
        else:
            values[path[-1]] = [] if isinstance(node, yaml.SequenceNode) else {}  # refused by the model

    def _read_text(
        self, text: str, model: type[BaseModel], path: SettingPath, values: dict[str, object], quoted: bool
    ) -> None:
        field = model.model_fields.get(path[-1])
        try:
            text = substitute(text, os.environ)
        except ValueError as error:
            self.unset[path] = Problem(path, f"{dotted(path)} {error}", self.places[path])
            return
        self.unset.pop(path, None)  # an override came after a text of the file
        values[path[-1]] = parse_scalar(text, field_kind(field), quoted) if field is not None else text

    def override(self, values: dict[str, object], key: str, text: str) -> None:
        """Put one override into `values`, making the sections on its way; a wrong key is left for the model to name."""
        path = tuple(key.split("."))
        model: type[BaseModel] = Config
        for depth, name in enumerate(path[:-1]):
            section = section_of(model, name)
            if section is None:  # an unknown section, or a setting that has none below it
                self.places[path[: depth + 1]] = f"override {key}={text}"
                values[name] = {}
                return
            model = section
            inner = values.get(name)
            if not isinstance(inner, dict):
                inner = values[name] = {}
            values = inner
        self.places[path] = f"override {key}={text}"
        self._read_text(text, model, path, values, quoted=False)

    def build(self, values: dict[str, object]) -> Config:
        """The checked configuration; raises all problems of reading and of the model together."""
        problems = [*self.problems, *self.unset.values()]
        known = {problem.path for problem in problems}
        try:
            config = Config.model_validate(values)
        except ConfigProblems as error:
            problems += [problem for problem in self.placed(error.problems) if problem.path not in known]
            raise ConfigProblems(problems) from None
        if problems:
            raise ConfigProblems(problems)
        return config

    def placed(self, problems: tuple[Problem, ...] | list[Problem]) -> list[Problem]:
        """The same problems, each with the place of its setting, or of the section that lacks it."""
        return [problem._replace(place=self._nearest_place(problem.path)) for problem in problems]

    def _nearest_place(self, path: SettingPath) -> str:
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def _place(self, node: yaml.Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}"
