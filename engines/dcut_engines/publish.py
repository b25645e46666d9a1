"""Putting a finished directory in place: one builder at a time, all of it or nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dcut_engines.sources import locked

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fs.h


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Wait until no other process builds `out`; then remove what killed builds left beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out.with_name(f".{out.name}.lock")):
        leftover = re.compile(re.escape(_prefix(out)) + r"\w{8}")  # tempfile's eight random characters
        for sibling in out.parent.iterdir():
            if leftover.fullmatch(sibling.name):
                shutil.rmtree(sibling)
        yield


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A directory beside `out` to build in; it becomes `out`, atomically, when the block ends without an error."""
    staging = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
    try:
        yield staging
        staging.chmod(0o755)
        for path in [*staging.rglob("*"), staging]:
            _sync(path)
        _put_in_place(staging, out)
        _sync(out.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(staging: Path, out: Path) -> None:
    """Rename staging to out; a directory already there ends up under staging's name."""
    if not out.is_dir() or not any(out.iterdir()):
        staging.rename(out)
        return
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(staging), os.fsencode(out)
    if renameat2 is not None:
        if renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(out))
    # A filesystem without exchange: `out` is missing for the moment between two renames.
    old = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
    out.rename(old)
    staging.rename(out)
    old.rename(staging)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prefix(out: Path) -> str:
    return f".{out.name}.build-"
