"""Prompts to measure with: the shipped manifests, or a file of the caller's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcut_trt.errors import DcutError

SHIPPED = ("gsm8k", "humaneval", "mt-bench")
FORMATS = (".json", ".jsonl", ".txt")
_FOLDER = Path(__file__).parent / "prompts"
_FACTS = ("name", "source", "license", "note")


class DatasetError(DcutError):
    """A prompt file is missing or malformed. The message names the file, the place in it and what belongs there."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts with unique ids, at least one. source: where they are from.  license: theirs.  note: what was changed."""

    name: str
    source: str
    license: str
    note: str
    prompts: tuple[Prompt, ...]


def load_dataset(name: str) -> Dataset:
    """A shipped dataset by name, or a file: .json (a manifest like the shipped ones), .jsonl (an object with "text"
    and, if wanted, "id" on each line) or .txt (one prompt a line). Raises DatasetError.
    """
    path = _FOLDER / f"{name}.json" if name in SHIPPED else Path(name).expanduser()
    if path.suffix not in FORMATS:
        raise DatasetError(f"--dataset {name}: must be {', '.join(SHIPPED)}, or a file ending in {', '.join(FORMATS)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"--dataset {name}: cannot be read: {error}") from error
    if path.suffix == ".json":
        return _manifest(path, text)
    entries = _json_lines(path, text) if path.suffix == ".jsonl" else _text_lines(text)
    return Dataset(path.stem, str(path), "not stated", "", _checked(path, entries))


def _manifest(path: Path, text: str) -> Dataset:
    raw = _parsed(str(path), text)
    for field in _FACTS:
        if not isinstance(raw.get(field), str):
            raise DatasetError(f"{path}: {field!r} must be a string, found {raw.get(field)!r}")
    if not isinstance(raw.get("prompts"), list):
        raise DatasetError(f"{path}: 'prompts' must be a list, found {type(raw.get('prompts')).__name__}")
    entries = [(f"prompts[{index}]", entry) for index, entry in enumerate(raw["prompts"])]
    facts = {field: raw[field] for field in _FACTS}
    return Dataset(**facts, prompts=_checked(path, entries))


def _json_lines(path: Path, text: str) -> list[tuple[str, Any]]:
    """(place, entry) of every line that is not blank; a line without an id is named by its number."""
    entries: list[tuple[str, Any]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            entry = _parsed(f"{path}: line {number}", line)
            entries.append((f"line {number}", {"id": f"line-{number}", **entry}))
    return entries


def _text_lines(text: str) -> list[tuple[str, Any]]:
    lines = enumerate(text.splitlines(), start=1)
    return [
        (f"line {number}", {"id": f"line-{number}", "text": line.strip()}) for number, line in lines if line.strip()
    ]


def _parsed(place: str, text: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{place}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise DatasetError(f"{place}: must be a JSON object, found {type(raw).__name__}")
    return raw


def _checked(path: Path, entries: list[tuple[str, Any]]) -> tuple[Prompt, ...]:
    prompts: dict[str, Prompt] = {}
    for place, entry in entries:
        if not isinstance(entry, dict):
            raise DatasetError(f"{path}: {place}: must be an object with 'id' and 'text', found {type(entry).__name__}")
        for field in ("id", "text"):
            if not isinstance(entry.get(field), str) or not entry[field].strip():
                raise DatasetError(f"{path}: {place}: {field!r} must be a non-empty string, found {entry.get(field)!r}")
        if entry["id"] in prompts:
            raise DatasetError(f"{path}: {place}: the id {entry['id']!r} is there twice")
        prompts[entry["id"]] = Prompt(entry["id"], entry["text"])
    if not prompts:
        raise DatasetError(f"{path}: holds no prompt")
    return tuple(prompts.values())
