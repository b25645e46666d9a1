"""The committed stubs are those of the .proto file."""

from __future__ import annotations

from pathlib import Path

from dcut_server.generate_stubs import OUTPUT, generate


def test_the_committed_stubs_are_what_the_proto_generates(tmp_path: Path) -> None:
    generate(tmp_path)
    assert sources(tmp_path) == sources(OUTPUT), "run: python -m dcut_server.generate_stubs"


def sources(root: Path) -> dict[Path, bytes]:
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.suffix in (".py", ".pyi")}
