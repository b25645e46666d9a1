"""Reading JSON that somebody else may have written: every value is checked, every complaint names file and field."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from dcut_trt.errors import DcutError

Default = TypeVar("Default")

LARGEST = 1e15

REQUIRED: Any = object()


class InvalidReport(DcutError):
    """A file is not what dcut-trt bench or a simulation writes. The message names file and field."""


class Fields:
    """One JSON object of a file. where: its place in the file, "" for the whole.

    Each reader takes a default for a field that may be missing, and raises InvalidReport for a value of another kind.
    """

    def __init__(self, path: Path, where: str, raw: object) -> None:
        self.path, self.where = path, where
        if not isinstance(raw, dict):
            raise InvalidReport(f"{path}: {where or 'the file'}: must be a JSON object")
        self.raw: dict[str, Any] = raw

    def wrong(self, name: str, said: str) -> InvalidReport:
        value = f"={self.raw[name]!r:.60}" if name in self.raw else ""
        return InvalidReport(f"{self.path}: {self._place(name)}{value}: {said}")

    def inner(self, name: str) -> Fields:
        return Fields(self.path, self._place(name), self._get(name))

    def optional(self, name: str) -> Fields | None:
        """None where the field is missing or null."""
        return None if self.raw.get(name) is None else self.inner(name)

    def items(self, name: str, default: Sequence[object] = REQUIRED) -> list[Fields]:
        values = self._list(name, default)
        return [Fields(self.path, f"{self._place(name)}[{at}]", raw) for at, raw in enumerate(values)]

    def text(self, name: str, default: str = REQUIRED) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "must be a string")
        return value

    def texts(self, name: str, default: Sequence[str] = REQUIRED) -> tuple[str, ...]:
        values = self._list(name, default)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(name, "must be a list of strings")
        return tuple(values)

    def number(self, name: str, default: float = REQUIRED, *, most: float = LARGEST) -> float:
        value = self._get(name, default)
        if not _number(value) or not 0 <= value <= most:
            raise self.wrong(name, f"must be a number of at least 0 and at most {most:g}")
        return float(value)

    def positive(self, name: str) -> float:
        value = self.number(name)
        if value == 0:
            raise self.wrong(name, "must be above 0")
        return value

    def whole(self, name: str, *, least: int = 0) -> int:
        value = self._get(name)
        if not _whole(value) or value < least:
            raise self.wrong(name, f"must be an integer of at least {least}")
        return int(value)

    def numbers(
        self, name: str, default: Sequence[float] = REQUIRED, *, length: int | None = None
    ) -> tuple[float, ...]:
        values = self._list(name, default)
        if not all(_number(value) and value >= 0 for value in values):
            raise self.wrong(name, "must be a list of numbers of at least 0")
        return tuple(float(value) for value in self._of_length(name, values, length))

    def wholes(self, name: str, *, length: int | None = None) -> tuple[int, ...]:
        values = self._list(name)
        if not values or not all(_whole(value) and value >= 0 for value in values):
            raise self.wrong(name, "must be a list of integers of at least 0, and not empty")
        return tuple(self._of_length(name, values, length))

    def gaps(self, name: str, count: Sequence[int]) -> tuple[float | None, ...]:
        """Shares, with null exactly where the count is 0."""
        values = self._of_length(name, self._list(name), len(count))
        for value, filled in zip(values, count, strict=True):
            if (value is None) == bool(filled) or (filled and not (_number(value) and 0 <= value <= 1)):
                raise self.wrong(name, "must hold a number from 0 to 1 where the count is not 0, and null elsewhere")
        return tuple(values)

    def rows(self, name: str, height: int, width: int) -> tuple[tuple[float, ...], ...]:
        values = self._list(name)
        good = len(values) == height and all(
            isinstance(row, list) and len(row) == width and all(_number(value) and value > 0 for value in row)
            for row in values
        )
        if not good:
            raise self.wrong(name, f"must be {height} rows of {width} numbers above 0")
        return tuple(tuple(float(value) for value in row) for row in values)

    def _get(self, name: str, default: Any = REQUIRED) -> Any:
        if name not in self.raw and default is REQUIRED:
            raise self.wrong(name, "is missing")
        return self.raw.get(name, default)

    def _list(self, name: str, default: Any = REQUIRED) -> list[Any]:
        value = self._get(name, default)
        if not isinstance(value, list | tuple):
            raise self.wrong(name, "must be a list")
        return list(value)

    def _of_length(self, name: str, values: list[Any], length: int | None) -> list[Any]:
        if length is not None and len(values) != length:
            raise self.wrong(name, f"has {len(values)} values, must have {length}")
        return values

    def _place(self, name: str) -> str:
        return f"{self.where}.{name}".lstrip(".")


def _number(value: object) -> bool:
    # Not isinstance: to Python True is an int. The bound also refuses NaN, and integers that no float can hold.
    return type(value) in (int, float) and abs(value) <= LARGEST  # type: ignore[arg-type]


def _whole(value: object) -> bool:
    return type(value) is int and _number(value)
