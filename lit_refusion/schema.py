"""Building dataclasses from plain config, with errors that name the full key."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lit_refusion.errors import UserError

T = TypeVar("T")
TARGET = "_target_"


def build(node: Any, expected: type[T], *, key: str = "") -> T:
    """An instance of `expected`, or of the subclass that `_target_` names, from a mapping.

    The dataclass is the schema: every field must be there, nothing else may be, and types must match.

    Args:
        node: plain mapping (from YAML).
        expected: dataclass, or an abstract one whose concrete class `_target_` names.
        key: where the node stands in the config, for errors.

    Raises:
        UserError: names the key, the value and the remedy.
    """
    if not isinstance(node, Mapping):
        raise UserError(f"{key or 'config'}={node!r}: expected a group of settings")
    cls = _resolve(node[TARGET], expected, key) if TARGET in node else expected
    if not dataclasses.is_dataclass(cls):
        raise UserError(f"{_join(key, TARGET)}={node.get(TARGET)}: {cls.__name__} must be a dataclass")
    hints = get_type_hints(cls)
    names = [item.name for item in dataclasses.fields(cls) if item.init]
    given = {str(name): value for name, value in node.items() if name != TARGET}
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"it takes {', '.join(names)}"
            raise UserError(f"unknown setting {_join(key, name)}={given[name]!r}: {hint}")
    for name in names:
        if name not in given:
            raise UserError(f"{_join(key, name)}: missing; set it, {cls.__name__} has no default for it")
    values = {name: _coerce(value, hints[name], _join(key, name)) for name, value in given.items()}
    return cls(**values)  # type: ignore[return-value]


def _resolve(path: Any, expected: type, key: str) -> type:
    where = f"{_join(key, TARGET)}={path}"
    module_name, _, class_name = str(path).rpartition(".")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{where}: cannot import it ({error}); give module.Class of an installed package") from error
    if not (isinstance(cls, type) and issubclass(cls, expected)):
        raise UserError(f"{where}: it must be a subclass of {expected.__name__}")
    return cls


def _coerce(value: Any, hint: Any, key: str) -> Any:
    """`value` as `hint`, or a UserError. Knows scalars, Optional, Literal, tuples, dicts and dataclasses."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _coerce_union(value, args, key)
    if origin is Literal:
        if value not in args:
            raise UserError(f"{key}={value}: unknown choice; it takes {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        return _coerce_tuple(value, args, key)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong_type(key, value, "a group of settings")
        return {str(name): _coerce(item, args[1], _join(key, name)) for name, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return build(value, hint, key=key)  # type: ignore[arg-type]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and is_number:
        if not math.isfinite(value):
            raise UserError(f"{key}={value}: must be finite")
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise _wrong_type(key, value, {int: "a whole number", float: "a number", str: "text"}.get(hint, hint.__name__))
    return value


def _coerce_union(value: Any, options: tuple[Any, ...], key: str) -> Any:
    if value is None and type(None) in options:
        return None
    problems = []
    for option in options:
        if option is not type(None):
            try:
                return _coerce(value, option, key)
            except UserError as error:
                problems.append(error)
    raise problems[0]


def _coerce_tuple(value: Any, args: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(key, value, "a list in brackets, for example [4,8] or [a,b]")
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    if len(value) != len(args):
        raise UserError(f"{key}={list(value)}: expected {len(args)} values")
    return tuple(_coerce(item, arg, f"{key}[{place}]") for place, (item, arg) in enumerate(zip(value, args)))


def _wrong_type(key: str, value: Any, wanted: str) -> UserError:
    return UserError(f"{key}={value!r}: expected {wanted}, found {type(value).__name__}")


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)
