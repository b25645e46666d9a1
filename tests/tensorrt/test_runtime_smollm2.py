"""The real model in fp32: its ONNX graphs, run through the TensorRT backend on the double, say what OpenVINO says."""

from __future__ import annotations

import numpy as np
import pytest
from acceptance.real_runs import chat_prompts, greedy, serve
from double_bundles import build_for_double, double_options, open_double, open_engine

from dcut_engines.digests import cache_dir
from dcut_trt.backends.openvino import load_openvino
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.manifest import read_manifest
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.rules import DCut
from dcut_trt.tokenizer import Tokenizer

MODEL, DRAFTER = "smollm2-135m-instruct", "smollm2-135m-dflash-b8"
PROMPTS, TOKENS, WIDTH = 32, 16, 8
# Not measured: costs so close together that dcut's choice changes from step to step.
TABLE = CostTable(
    (1,), (0.25, 0.5, 0.75, 1.0), np.array([[10.0, 10.9, 11.0, 11.04]]), np.array([9.0]), "fixed", "never"
)


@pytest.mark.timeout(300)
def test_dcut_on_the_double_equals_plain_openvino(smollm2_bundle_fp32) -> None:
    manifest = read_manifest(smollm2_bundle_fp32)
    networks = load_openvino(smollm2_bundle_fp32, manifest, EngineOptions(kv_memory_mib=512))
    tokenizer = Tokenizer.load(smollm2_bundle_fp32, manifest.tokenizer)
    plain = Engine(*networks, tokenizer, make_policy("plain", None))
    requests = greedy(chat_prompts(plain, PROMPTS), TOKENS)
    expected = serve(plain, plain.policy, requests, WIDTH)
    plain.close()

    out = cache_dir() / "tests" / "smollm2-double"
    options = double_options(MODEL, DRAFTER, out, max_batch=WIDTH, max_len=160)
    runtime = open_double()
    engine = open_engine(runtime, build_for_double(options, out.with_name("smollm2-double-graphs")))
    assert serve(engine, DCut(TABLE), requests, WIDTH) == expected
    records = [record for record in engine.trace.records if record.kind == "decode"]
    assert engine.trace.totals.accepted > 100
    assert len({record.ratio for record in records}) >= 2
    assert {run.engine for run in runtime.module.runs} == {"target", "drafter"}
