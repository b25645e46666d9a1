"""Coverage-guided fuzzing of one target: pip install atheris; python tests/fuzz/fuzz.py TARGET -max_total_time=60."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["dcut_trt", "dcut_engines", "dcut_server"]):
    from targets import TARGETS, seeds, survive


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: fuzz.py {'|'.join(TARGETS)} [libFuzzer options]")
    name = sys.argv.pop(1)
    with tempfile.TemporaryDirectory() as corpus:
        for index, data in enumerate(seeds(name)):
            (Path(corpus) / f"seed{index}").write_bytes(data)
        atheris.Setup([*sys.argv, corpus], lambda data: survive(name, data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
