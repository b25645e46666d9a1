"""Regenerates the protobuf and gRPC stubs: python -m dcut_server.generate_stubs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROTO_ROOT = HERE.parents[1] / "proto"
PROTO = Path("dcut/v1/dcut.proto")
OUTPUT = HERE / "generated"
PACKAGES = ("", "dcut", "dcut/v1")


def generate(output: Path) -> None:
    """Write dcut/v1/dcut_pb2.py, .pyi and dcut_pb2_grpc.py under OUTPUT (needs grpcio-tools).

    The stubs live inside our package while the descriptor keeps its public name, dcut/v1/dcut.proto: protoc has no
    option for that, so the one import between the two files is rewritten.
    """
    output.mkdir(parents=True, exist_ok=True)
    flags = [f"--{kind}_out={output}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}", *flags, str(PROTO_ROOT / PROTO)]
    subprocess.run(command, check=True)
    for package in PACKAGES:
        (output / package / "__init__.py").touch()
    stub = output / "dcut/v1/dcut_pb2_grpc.py"
    text = stub.read_text(encoding="utf-8")
    stub.write_text(text.replace("from dcut.v1 import", "from dcut_server.generated.dcut.v1 import"), encoding="utf-8")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
