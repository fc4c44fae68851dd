"""Frozen dataclasses to plain JSON values and back, strictly.

In: a dataclass or the dictionary read from a file. Out: the other form. Unknown keys, missing keys
and wrong types are errors that name the path (`plan.memory.arena`); nothing is filled in silently.
"""

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

from sitsc.core.errors import PlanError

T = TypeVar("T")
_SCALARS = (str, int, float, bool)


def to_value(record: Any) -> Any:
    """A JSON value of a dataclass: tuples become lists, nested records dictionaries."""
    if (names := _names(type(record))) is not None:
        return {name: to_value(getattr(record, name)) for name in names}
    if isinstance(record, dict):
        return {key: to_value(item) for key, item in record.items()}
    if isinstance(record, (list, tuple)):
        return [to_value(item) for item in record]
    return record


def from_value(kind: type[T], value: Any, path: str) -> T:
    """The dataclass `kind` from a JSON value. Raises PlanError naming `path` on any mismatch."""
    return _read(kind, value, path)


def _read(kind: Any, value: Any, path: str) -> Any:
    if type(value) is kind and kind in _SCALARS:  # most of a plan
        return value
    if kind is Any:
        return value
    if _names(kind) is not None:
        return _read_record(kind, value, path)
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _read_tuple(kind, value, path)
    if origin is dict:
        _expect(isinstance(value, dict), path, "an object", value)
        item = typing.get_args(kind)[1]
        return {key: _read(item, element, f"{path}.{key}") for key, element in value.items()}
    if origin in (types.UnionType, typing.Union):
        return _read_union(kind, value, path)
    return _read_scalar(kind, value, path)


def _read_record(kind: Any, value: Any, path: str) -> Any:
    _expect(isinstance(value, dict), path, "an object", value)
    hints = _hints(kind)
    names = hints.keys()
    if extra := sorted(value.keys() - names):
        raise PlanError(f"unknown key {extra[0]!r}", where=path, hint="made by another version?")
    if missing := sorted(names - value.keys()):
        raise PlanError(f"missing key {missing[0]!r}", where=path, hint="the file is incomplete")
    return kind(
        **{name: _read(hint, value[name], f"{path}.{name}") for name, hint in hints.items()}
    )


@functools.cache
def _names(kind: Any) -> tuple[str, ...] | None:
    """Fields of a dataclass, None for any other type."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in _names(kind) or ()}


def _read_tuple(kind: Any, value: Any, path: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list), path, "a list", value)
    args = typing.get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_read(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    _expect(len(args) == len(value), path, f"{len(args)} items", value)
    return tuple(
        _read(arg, item, f"{path}[{i}]")
        for i, (arg, item) in enumerate(zip(args, value, strict=True))
    )


def _read_union(kind: Any, value: Any, path: str) -> Any:
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if value is None and len(options) < len(typing.get_args(kind)):
        return None
    if len(options) == 1:
        return _read(options[0], value, path)
    for option in options:
        try:
            return _read(option, value, path)
        except PlanError:
            continue
    raise PlanError(f"{value!r} is none of {kind}", where=path)


def _read_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    _expect(type(value) is kind, path, kind.__name__, value)
    return value


def _expect(holds: bool, path: str, wanted: str, value: Any) -> None:
    if not holds:
        shown = repr(value)
        raise PlanError(f"expected {wanted}, found {shown[:60]}", where=path)
