"""Where build inputs are cached, and content hashes of big files that are computed once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from dcut_trt.manifest import file_sha256

# A file changed this recently could change again without a new timestamp, so its hash is not remembered.
SETTLED_SECONDS = 2.0


def cache_dir() -> Path:
    """$DCUT_CACHE, or ~/.cache/dcut-trt."""
    return Path(os.environ.get("DCUT_CACHE") or "~/.cache/dcut-trt").expanduser()


def write_atomic(path: Path, text: str) -> None:
    """Replace a small file so that readers see the old text or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def cached_sha256(path: Path) -> str:
    """Hex sha256 of a file, remembered by device, inode, size and modification time."""
    status = path.stat()
    facts = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
    note = cache_dir() / "digests" / hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if note.is_file() and len(known := note.read_text(encoding="ascii").strip()) == 64:
        return known
    digest = file_sha256(path)
    if time.time() - status.st_mtime > SETTLED_SECONDS:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
            write_atomic(note, digest)
    return digest


def files_sha256(files: Iterable[Path]) -> str:
    """Hex sha256 over the names and contents of the files of one checkpoint; a single file's is its own."""
    named = {path.name: cached_sha256(path) for path in files}
    if len(named) == 1:
        return next(iter(named.values()))
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
