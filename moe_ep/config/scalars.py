"""The text of one setting -> its value. The field decides the type, never the look of the text.

So `1e-3` is a float for a float field and `1e3` an integer for an integer field (YAML 1.1 would make both strings), and
a run named `no` keeps its name. Text that does not fit is returned as it is: the model then refuses it with the same
sentence as a wrong value given in Python.
"""

import re
from collections.abc import Mapping

from moe_ep.config.fields import FieldKind

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::((?:(?!\$\{)[^}])*))?\}")
_LARGEST_INT = 2**63 - 1  # what tensors and C++ can hold
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULLS = ("", "~", "null")


def parse_scalar(text: str, kind: FieldKind, quoted: bool = False) -> object:
    """The value of `text` for a field of this kind; `text` itself if it is not one (the model refuses it).

    Quotes keep a text from being null; they do not make text of a number: "8" is 8 for an integer field.
    """
    if text in kind.words:
        return text
    if not quoted and text.lower() in _NULLS:
        if kind.optional:
            return None
        if kind.section is not None:
            return {}  # `ep:` with nothing below: all defaults
    if kind.scalar is bool:
        return _BOOLS.get(text.lower(), text)
    if kind.scalar is int:
        return _parse_int(text)
    if kind.scalar is float:
        return _parse_float(text)
    return text


def _parse_float(text: str) -> float | str:
    if not _NUMBER.fullmatch(text):
        return text  # also nan and inf, which no setting accepts
    value = float(text)
    return text if value in (float("inf"), float("-inf")) else value


def _parse_int(text: str) -> int | str:
    value = int(text) if re.fullmatch(r"[+-]?[0-9]{1,19}", text) else _parse_float(text)
    if isinstance(value, str) or value != int(value) or abs(value) > _LARGEST_INT:
        return text
    return int(value)


def substitute(text: str, environ: Mapping[str, str]) -> str:
    """Replace `${NAME}` and `${NAME:default}` by environment variables.

    A variable that is set to nothing counts as set. The default may hold anything but `}` and another `${`.

    Raises:
        ValueError: a variable is not set and has no default, or a `${` does not begin such a form; the message is the
            part of a sentence that follows the setting's name.
    """
    if "${" in _VARIABLE.sub("", text):
        raise ValueError(f"has the text {text!r}, whose ${{ cannot be read. Write ${{NAME}} or ${{NAME:default}}.")

    def value_of(match: re.Match[str]) -> str:
        name, default = match.groups()
        value = environ.get(name, default)
        if value is None:
            raise ValueError(
                f"uses the environment variable {name}, which is not set. Set it or write ${{{name}:default}}."
            )
        return value

    return _VARIABLE.sub(value_of, text)
