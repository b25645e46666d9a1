"""The real target, SmolLM2-135M-Instruct in fp32, through both emitters against transformers on the same GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from graph_runner import PagedRunner, TargetRows, run_target
from tiny_targets import FloatArray, TinyTarget
from window_runner import WindowRunner

from dcut_engines.emit_onnx import emit_target

FEATURE_LAYERS = (1, 14, 27)
MAX_LEN = 80
# Relative to the largest value of the reference: logits reach about 30, and late layers' features some thousands.
TOLERANCE = 1e-4

Call = Callable[[Sequence[Sequence[int]], Sequence[int]], dict[str, FloatArray]]


@pytest.fixture(scope="module")
def target(smollm2_target: TinyTarget) -> TinyTarget:
    return smollm2_target


@pytest.fixture(scope="module", params=["openvino", "onnx"])
def call(
    request: pytest.FixtureRequest,
    target: TinyTarget,
    smollm2_bundle_fp32: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Call:
    """Feeds chunks[b] to request b behind its first starts[b] rows."""
    if request.param == "openvino":
        paged = PagedRunner(smollm2_bundle_fp32 / "target.xml")
        return lambda chunks, starts: run_target(
            paged, [TargetRows(b, starts[b], chunk) for b, chunk in enumerate(chunks)]
        )
    path = tmp_path_factory.mktemp("smollm2") / "target.onnx"
    emit_target(target.config, target.weights, FEATURE_LAYERS, "fp32", MAX_LEN, path, max_len=MAX_LEN, window=None)
    return WindowRunner(path, 3).target


def is_close(actual: FloatArray, expected: FloatArray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))


def test_prefill_decode_and_ragged_verification(target: TinyTarget, call: Call) -> None:
    rng = np.random.default_rng(5)
    sequences = [rng.integers(target.config.vocab_size, size=length).tolist() for length in (66, 41, 50)]
    references = [target.reference(tokens) for tokens in sequences]
    past = [0, 0, 0]
    # Prefill, a second chunk, two decode steps, then verification at random depths.
    steps = [[33, 17, 30], [9, 8, 2], [1, 1, 1], [1, 1, 1], *rng.integers(1, 9, (2, 3)).tolist()]
    for counts in steps:
        ends = [p + count for p, count in zip(past, counts, strict=True)]
        outputs = call([tokens[p:e] for tokens, p, e in zip(sequences, past, ends, strict=True)], past)
        kept = list(zip(references, past, ends, strict=True))
        is_close(outputs["logits"], np.concatenate([logits[p:e] for (logits, _), p, e in kept]))
        for index, layer in enumerate(FEATURE_LAYERS):
            width = target.config.hidden_size
            features = outputs["features"][:, index * width : (index + 1) * width]
            is_close(features, np.concatenate([after[layer][p:e] for (_, after), p, e in kept]))
        past = ends
