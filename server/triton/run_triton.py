"""Starts a real tritonserver with the dcut model, on loopback, and ends it at SIGTERM or SIGINT.

It is the tritonserver of the nvidia-pytriton wheel where this Python has that installed, else the one on PATH.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
POLL_S = 0.05
EXIT_S = 10


def main() -> int:
    options = _parser().parse_args()
    ports = {name: getattr(options, f"{name}_port") or free_port() for name in ("http", "grpc", "metrics")}
    signal.signal(signal.SIGTERM, _interrupt)
    server = subprocess.Popen(command(options, ports), env=environment(options))
    try:
        if not _ready(server, f"http://{options.host}:{ports['http']}/v2/health/ready", options.start_seconds):
            why = "was not ready in time" if server.poll() is None else f"ended with code {server.returncode}"
            print(f"tritonserver {why}", file=sys.stderr)
            return 1
        print("tritonserver ready " + " ".join(f"{name}={options.host}:{port}" for name, port in ports.items()))
        sys.stdout.flush()
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _end(server)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:50051", help="of the dcut-trt gRPC server")
    parser.add_argument("--host", default="127.0.0.1", help="interface that tritonserver binds to")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--{name}-port", type=int, default=port, help=f"{port} unless given; 0 picks a free one")
    parser.add_argument("--model-repository", type=Path, help="another than the one beside this script")
    parser.add_argument("--start-seconds", type=float, default=60.0, help="time for tritonserver to become ready")
    parser.add_argument("--cache-dir", type=Path, default=_cache_dir(), help="for links to the wheel's files")
    return parser


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dcut-trt" / "triton"


def command(options: argparse.Namespace, ports: dict[str, int]) -> list[str]:
    """tritonserver and its arguments. Exits with one line when there is no tritonserver."""
    package = _package_dir("pytriton")
    if package is not None:
        program = str(package / "tritonserver" / "bin" / "tritonserver")
        backends = [f"--backend-directory={_link_backend(package / 'tritonserver', options.cache_dir)}"]
    elif found := shutil.which("tritonserver"):
        program, backends = found, []
    else:
        sys.exit("tritonserver is not on PATH, and this Python has no nvidia-pytriton: pip install nvidia-pytriton")
    addresses = [f"--{name}-address={options.host}" for name in ports]
    numbers = [f"--{name}-port={port}" for name, port in ports.items()]
    return [
        program,
        f"--model-repository={repository(options)}",
        f"--exit-timeout-secs={EXIT_S // 2}",
        *backends,
        *addresses,
        *numbers,
    ]


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The model's Python is this one."""
    found = dict(os.environ, DCUT_ADDRESS=options.address, PYTHONDONTWRITEBYTECODE="1")
    package = _package_dir("pytriton")
    if package is not None:
        libraries = [str(package.parent / "nvidia_pytriton.libs"), str(sysconfig.get_config_var("LIBDIR"))]
        found["LD_LIBRARY_PATH"] = _path(*libraries, found.get("LD_LIBRARY_PATH"))
        found["PATH"] = _path(str(Path(sys.executable).parent), found.get("PATH"))
    return found


def repository(options: argparse.Namespace) -> Path:
    """The model repository; where dcut_server is not installed, one of links with the package beside the model.

    Triton's Python ignores PYTHONPATH, but looks for modules in the model's folder.
    """
    if options.model_repository is not None:
        return Path(options.model_repository)
    if _package_dir("dcut_server") is not None:
        return HERE / "model_repository"
    linked = Path(options.cache_dir) / "model_repository"
    for source in (*(HERE / "model_repository" / "dcut").iterdir(), HERE.parent / "dcut_server"):
        _link(source, linked / "dcut" / source.name)
    return linked


def _package_dir(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _link_backend(tritonserver: Path, cache_dir: Path) -> Path:
    """The wheel keeps the backend and its interpreter stubs apart; Triton wants them in one folder."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    backend = cache_dir / f"backends-{version}" / "python"
    stub = tritonserver / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        sys.exit(f"nvidia-pytriton has no python backend for Python {version}")
    for source in (*(tritonserver / "backends" / "python").glob("*.*"), stub):
        _link(source, backend / source.name)
    return backend.parent


def _link(source: Path, link: Path) -> None:
    if link.is_symlink() and link.readlink() == source:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f"{link.name}.{os.getpid()}")
    fresh.symlink_to(source)
    fresh.replace(link)


def _path(*parts: str | None) -> str:
    return os.pathsep.join(part for part in parts if part)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ready(server: subprocess.Popen[bytes], url: str, limit_s: float) -> bool:
    """Whether the server came up, with every model loaded, before it ended or the time was over."""
    limit = time.monotonic() + limit_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while server.poll() is None and time.monotonic() < limit:
        try:
            with opener.open(url, timeout=1):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    return False


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
