"""What a setting accepts, read from its annotation: the loader types text by it, error sentences quote it.

A field is one of: a section (another model), a number with bounds, true/false, text, or one of a few words; it may also
accept a word beside the number (`auto`) or null.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

Bound = int | float


@dataclass(frozen=True)
class FieldKind:
    """The values that one setting accepts.

    `scalar` is int, float, bool, str or None (only `words`); `section` is the model class of a nested section.
    Bounds: `ge <= value <= le`, `gt < value < lt`; None = no bound.
    """

    scalar: type | None = None
    section: type[BaseModel] | None = None
    words: tuple[str, ...] = ()
    optional: bool = False
    ge: Bound | None = None
    gt: Bound | None = None
    le: Bound | None = None
    lt: Bound | None = None

    def describe(self) -> str:
        """The accepted values in words: "an integer from 1 to 64", "one of softmax, sigmoid"."""
        parts = []
        if self.section is not None:
            parts.append(f"a section, that is a map of {', '.join(self.section.model_fields)}")
        if self.scalar is not None:
            noun = {int: "an integer", float: "a finite number", bool: "true or false", str: "a text"}[self.scalar]
            parts.append(noun + self._describe_bounds())
        if len(self.words) > 1:
            parts.append(f"one of {', '.join(self.words)}")
        else:
            parts.extend(self.words)
        if self.optional:
            parts.append("null")
        return ", or ".join(parts)

    def _describe_bounds(self) -> str:
        if self.ge is not None and self.le is not None:
            return f" from {self.ge} to {self.le}"
        bounds = [
            f"{words} {bound}"
            for words, bound in (
                ("of at least", self.ge),
                ("above", self.gt),
                ("of at most", self.le),
                ("below", self.lt),
            )
            if bound is not None
        ]
        return " " + " and ".join(bounds) if bounds else ""


def field_kind(field: FieldInfo) -> FieldKind:
    """Read the annotation and the bounds of a pydantic field."""
    return _apply_metadata(_kind_of(field.annotation), field.metadata)


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model class of the sub-section `name` of `model`; None for a plain setting or an unknown name."""
    field = model.model_fields.get(name)
    return field_kind(field).section if field is not None else None


def required_settings(model: type[BaseModel], name: str) -> list[str]:
    """The settings that the sub-section `name` of `model` cannot do without."""
    section = section_of(model, name)
    return [inner for inner, field in section.model_fields.items() if field.is_required()] if section else []


def walk_settings(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all settings and sections at and below `model`, parents first."""
    for name in model.model_fields:
        yield (*path, name)
        section = section_of(model, name)
        if section is not None:
            yield from walk_settings(section, (*path, name))


def _kind_of(annotation: object) -> FieldKind:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        return _apply_metadata(_kind_of(inner), metadata)
    if origin is Literal:
        return FieldKind(words=get_args(annotation))
    if origin is Union or origin is UnionType:
        merged = FieldKind()
        for member in get_args(annotation):
            merged = _merge(merged, _kind_of(member))
        return merged
    if annotation is NoneType:
        return FieldKind(optional=True)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return FieldKind(section=annotation)
    if annotation in (int, float, bool, str):
        return FieldKind(scalar=annotation)
    raise TypeError(f"a setting cannot have the type {annotation!r}; use int, float, bool, str, Literal or a section")


def _merge(left: FieldKind, right: FieldKind) -> FieldKind:
    changes = {name: value for name, value in vars(right).items() if value != getattr(_NOTHING, name)}
    return replace(left, **changes)


def _apply_metadata(kind: FieldKind, metadata: list[Any]) -> FieldKind:
    for item in metadata:
        if isinstance(item, Ge | Gt | Le | Lt):
            name = type(item).__name__.lower()
            kind = replace(kind, **{name: getattr(item, name)})
    return kind


_NOTHING = FieldKind()
