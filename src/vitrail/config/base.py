"""Config: base class of all settings. Validation and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from vitrail.errors import ConfigError, did_you_mean

Pair = int | tuple[int, int]

TYPE_DESCRIPTIONS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true, false",
    types.NoneType: "none",
}
"""Type -> its description in error messages."""


def pair(value: Pair) -> tuple[int, int]:
    """224 -> (224, 224); (height, width) stays."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Frozen, keyword-only dataclass, validated on construction; `to_dict` and `from_dict` are inverse."""

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():
            object.__setattr__(self, name, _coerce_field(type(self), name, kind, getattr(self, name)))
        self.check()

    def check(self) -> None:
        """Raise ConfigError if the fields are inconsistent."""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return type(self).from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for `json.dumps`."""
        return {f.name: _to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = field_types(cls)
        for name in values:
            if name not in known:
                raise ConfigError(f"{cls.__name__} has no field {name!r}{did_you_mean(name, known)}")
        return cls(**values)


C = TypeVar("C", bound=Config)


def allow_use_cache(cls: type[C]) -> type[C]:
    """Class decorator: allow the assignment of `use_cache`, which transformers' Trainer sets on every `model.config`.

    The attribute is stored and ignored; it is not a field, so comparing and saving configs ignore it.
    TensorBoard's callback calls `to_json_string`. Fields stay frozen.
    """
    frozen = cls.__setattr__

    def set_attribute(self: C, name: str, value: Any) -> None:
        (object.__setattr__ if name == "use_cache" else frozen)(self, name, value)

    cls.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
    return cls


def _field_types(cls: type) -> dict[str, Any]:
    resolved = get_type_hints(cls)
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls)}


field_types: Callable[[type], dict[str, Any]] = cache(_field_types)
"""Field name -> resolved type."""


def _coerce_field(cls: type, name: str, kind: Any, value: Any) -> Any:
    """The value converted to the annotated type, or ConfigError."""
    coerced, ok = _coerce(kind, value)
    if ok:
        return coerced
    if options := _options(kind):
        hint = did_you_mean(value, options) if isinstance(value, str) else f"; available: {', '.join(options)}."
        words = [TYPE_DESCRIPTIONS[a] for a in get_args(kind) if a in TYPE_DESCRIPTIONS]
        if words and "did you mean" not in hint:
            *most, last = *words, *options
            hint = f"; expected {', '.join(most)} or {last}."
        raise ConfigError(f"{cls.__name__}.{name}={value!r} is not a valid value{hint}")
    groups = [k for k in get_args(kind) or (kind,) if isinstance(k, type) and issubclass(k, Config)]
    if groups and isinstance(value, str):
        first = next(iter(field_types(groups[0])))
        raise ConfigError(f"{cls.__name__}.{name} is a group of settings such as {name}.{first}=..., got {value!r}.")
    raise ConfigError(f"{cls.__name__}.{name} expects {_type_name(kind)}, got {value!r}.")


def _coerce(kind: Any, value: Any) -> tuple[Any, bool]:
    """The value converted to the annotated type, and whether that succeeded."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value, True
    if origin is Literal:
        value = "none" if value is None and "none" in args else value  # `key=none` may be the word
        return value, value in args
    if origin in (Union, types.UnionType):
        return _coerce_to_union(args, value)
    if origin is tuple and isinstance(value, list | tuple):
        inner = [args[0]] * len(value) if args[1:] == (Ellipsis,) else list(args)
        if len(inner) != len(value):
            return value, False
        parts = [_coerce(k, v) for k, v in zip(inner, value, strict=True)]
        return tuple(p for p, _ in parts), all(ok for _, ok in parts)
    if isinstance(kind, type) and issubclass(kind, Config):
        if isinstance(value, kind):
            return value, True
        if isinstance(value, str | int | float) and hasattr(kind, "from_text"):  # a bare number says what it lacks
            return kind.from_text(str(value)), True
        return (kind.from_dict(value), True) if isinstance(value, Mapping) else (value, False)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value), math.isfinite(value)
    if kind is int:
        return value, isinstance(value, int) and not isinstance(value, bool)
    if kind is type(None):
        return None, value is None
    return value, isinstance(value, origin or kind)


def _coerce_to_union(kinds: tuple[Any, ...], value: Any) -> tuple[Any, bool]:
    """Convert to the first type of a union that accepts the value."""
    first_error = None
    for kind in kinds:
        try:
            coerced, ok = _coerce(kind, value)
        except ConfigError as error:
            first_error = first_error or error
            continue
        if ok:
            return coerced, True
    if first_error is not None:
        raise first_error
    return value, False


def _options(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(a) for a in get_args(kind)]
    if get_origin(kind) in (Union, types.UnionType):
        return [o for a in get_args(kind) for o in _options(a)]
    return []


def _type_name(kind: Any) -> str:
    names = {**TYPE_DESCRIPTIONS, bool: "true or false", str: "text"}
    if kind in names:
        return names[kind]
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Config):
        return str(value) if hasattr(value, "from_text") else value.to_dict()
    if isinstance(value, tuple):
        return [_to_plain(v) for v in value]
    return value
