"""JSON is taken only where every value has the type that its field says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dcut_trt.errors import BundleError
from dcut_trt.manifest import read_manifest
from dcut_trt.typed_json import from_json


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    several: tuple[Inner, ...]
    pair: tuple[int, int]
    by_name: dict[str, Inner]
    words: list[str]
    on: bool
    maybe: int | None = None


GOOD: dict[str, Any] = {
    "name": "x",
    "inner": {"size": 1, "weight": 2},
    "several": [{"size": 3}],
    "pair": [4, 5],
    "by_name": {"a": {"size": 6}},
    "words": ["w"],
    "on": True,
}


def test_every_kind_of_field() -> None:
    assert from_json(Outer, GOOD) == Outer(
        "x", Inner(1, 2.0), (Inner(3),), (4, 5), {"a": Inner(6)}, ["w"], on=True, maybe=None
    )
    assert from_json(Outer, GOOD | {"maybe": 7}).maybe == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "name=1: must be str"),
        ({"inner": {"size": "1"}}, "inner.size='1': must be int"),
        ({"inner": {"size": True}}, "inner.size=True: must be int"),
        ({"inner": {}}, "inner: field 'size' is missing"),
        ({"inner": {"size": 1, "colour": 2}}, "inner: unknown field 'colour'"),
        ({"several": [{"size": 1}, None]}, r"several\[1\]=None: must be dict"),
        ({"pair": [1]}, "pair: has 1 values, must have 2"),
        ({"by_name": [1]}, r"by_name=\[1\]: must be dict"),
        ({"words": "w"}, "words='w': must be list"),
        ({"on": 1}, "on=1: must be bool"),
        ({"maybe": 1.5}, "maybe=1.5: must be int"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(Outer, GOOD | change)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "", "a\0b"])
def test_a_manifest_may_not_name_files_outside_its_bundle(tmp_path: Path, name: str) -> None:
    fuzz = Path(__file__).parents[1] / "fuzz" / "manifest.json"
    manifest = json.loads(fuzz.read_text())
    manifest["files"] = {name: {"size": 1, "sha256": "00"}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="not inside the bundle"):
        read_manifest(tmp_path)
