"""JSON into frozen dataclasses, with every value checked against its annotation."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


def from_json(kind: type[Record], raw: Any, where: str = "") -> Record:
    """A dataclass out of a JSON object. Fields may be str, int, float, bool, None unions, tuples, lists, dicts with
    string keys, and dataclasses of these.

    Raises ValueError naming the place, what it holds and what belongs there; also for a missing or unknown field.
    """
    return _value(kind, raw, where)  # type: ignore[no-any-return]


def _value(kind: Any, raw: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _record(kind, raw, where)
    origin = get_origin(kind)
    if origin is not None:
        return _container(kind, origin, raw, where)
    if kind is float and type(raw) is int:
        return float(raw)
    _require(kind, raw, where)
    return raw


def _container(kind: Any, origin: Any, raw: Any, where: str) -> Any:
    parts = get_args(kind)
    if origin is types.UnionType:
        (present,) = (part for part in parts if part is not type(None))
        return None if raw is None else _value(present, raw, where)
    if origin is tuple:
        return _items(parts, raw, where)
    _require(origin, raw, where)
    if origin is dict:
        return {key: _value(parts[1], value, f"{where}.{key}") for key, value in raw.items()}
    return [_value(parts[0], value, f"{where}[{index}]") for index, value in enumerate(raw)]


def _record(kind: Any, raw: Any, where: str) -> Any:
    _require(dict, raw, where)
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(raw.keys() - fields.keys())
    if unknown:
        raise ValueError(f"{_place(where)}: unknown field {unknown[0]!r}")
    for name, field in fields.items():
        if name not in raw and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{_place(where)}: field {name!r} is missing")
    return kind(
        **{name: _value(hints[name], raw[name], f"{where}.{name}".lstrip(".")) for name in fields if name in raw}
    )


def _items(parts: tuple[Any, ...], raw: Any, where: str) -> tuple[Any, ...]:
    _require(list, raw, where)
    if parts[-1] is Ellipsis:
        parts = (parts[0],) * len(raw)
    if len(raw) != len(parts):
        raise ValueError(f"{_place(where)}: has {len(raw)} values, must have {len(parts)}")
    return tuple(
        _value(part, value, f"{where}[{index}]") for index, (part, value) in enumerate(zip(parts, raw, strict=True))
    )


def _require(kind: type, raw: Any, where: str) -> None:
    # Not isinstance: to Python True is an int.
    if type(raw) is not kind:
        raise ValueError(f"{_place(where)}={raw!r:.80}: must be {kind.__name__}")


def _place(where: str) -> str:
    return where or "manifest"
