"""The real model in fp32, loaded once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dcut_trt.backends.openvino import load_openvino
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.manifest import read_manifest
from dcut_trt.spec.policies import make_policy
from dcut_trt.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_engine(smollm2_bundle_fp32: Path) -> Iterator[Engine]:
    """An idle engine; tests set its policy while it is idle."""
    manifest = read_manifest(smollm2_bundle_fp32)
    target, drafter = load_openvino(smollm2_bundle_fp32, manifest, EngineOptions(kv_memory_mib=512))
    engine = Engine(
        target, drafter, Tokenizer.load(smollm2_bundle_fp32, manifest.tokenizer), make_policy("plain", None)
    )
    yield engine
    engine.close()
