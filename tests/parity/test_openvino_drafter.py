"""The OpenVINO drafter against the dense torch reference, over growing ragged contexts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from dflash_reference import TinyDrafter, draft_block, tiny_drafter
from graph_runner import DraftRows, PagedRunner, run_drafter

from dcut_engines.emit_openvino import emit_drafter
from dcut_engines.model_config import RopeConfig
from dcut_trt.backends.base import Limits
from dcut_trt.backends.openvino import OpenVinoDrafter, _Graph
from dcut_trt.stage_types import DraftInput

TOLERANCE = 1e-4
SUBSET = np.array([3, 60, 8, 5, 0, 41, 22, 17], np.int32)  # in no order: a logit's index is not its token id
YARN = RopeConfig(theta=10000.0, kind="yarn", factor=4.0, original_max_position=16)
DRAFTERS = {
    "plain": {},
    "one_layer": {"layers": 1},
    "biased": {"attention_bias": True, "kv_heads": 4},
    "block_8_yarn": {"block_size": 8, "layers": 3, "rope": YARN},
}
# New context rows of three requests in each call; the first call is the prompt.
CALLS = ([40, 1, 30], [1, 4, 2], [0, 1, 0], [2, 30, 4])


@pytest.mark.parametrize("vocab", [None, SUBSET], ids=["whole_vocab", "draft_vocab"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("options", DRAFTERS.values(), ids=DRAFTERS)
def test_drafts_equal_the_reference(
    options: dict[str, object], causal: bool, vocab: np.ndarray | None, tmp_path: Path
) -> None:
    drafter = tiny_drafter(causal=causal, **options)
    runner = PagedRunner(emitted(drafter, vocab, tmp_path))
    features = [drafter.random_features(sum(call[i] for call in CALLS), seed=i) for i in range(3)]
    past = [0, 0, 0]
    for step, new in enumerate(CALLS):
        ends = [p + n for p, n in zip(past, new, strict=True)]
        anchors = [7 * step + request for request in range(3)]
        rows = [DraftRows(i, past[i], features[i][past[i] : ends[i]], anchors[i]) for i in range(3)]
        tokens, confidence = run_drafter(runner, drafter.config, rows)
        margin = runner.request.get_tensor("margin").data.reshape(tokens.shape)
        for i in range(3):
            context = features[i][: ends[i]]
            expected = draft_block(
                context, anchors[i], drafter.config, drafter.weights, drafter.embedding, drafter.head, vocab
            )
            np.testing.assert_array_equal(tokens[i], expected.tokens)
            np.testing.assert_allclose(confidence[i], expected.confidence, atol=TOLERANCE)
            np.testing.assert_allclose(margin[i], margin_of(expected.logits), atol=TOLERANCE)
        past = ends


def test_one_array_as_embedding_and_head_is_stored_once(tmp_path: Path) -> None:
    drafter = tiny_drafter(causal=True)
    path, apart = tmp_path / "tied.xml", tmp_path / "apart.xml"
    for head, file in ((drafter.embedding, path), (drafter.head, apart)):
        emit_drafter(drafter.config, drafter.weights, drafter.embedding, head, None, "fp32", 64, file)
    saved = apart.with_suffix(".bin").stat().st_size - path.with_suffix(".bin").stat().st_size
    assert saved == drafter.embedding.nbytes


def test_bf16_confidence_follows_fp32(tmp_path: Path) -> None:
    drafter = tiny_drafter(causal=True)
    path = tmp_path / "drafter.xml"
    emit_drafter(drafter.config, drafter.weights, drafter.embedding, drafter.head, None, "bf16", 64, path)
    features = drafter.random_features(20, seed=1)
    _, confidence = run_drafter(
        PagedRunner(path, precision="bf16"), drafter.config, [DraftRows(0, 0, features, anchor=9)]
    )
    expected = draft_block(features, 9, drafter.config, drafter.weights, drafter.embedding, drafter.head)
    np.testing.assert_allclose(confidence[0], expected.confidence, atol=0.1)


@pytest.mark.parametrize("older", [False, True])
def test_a_backend_tells_the_margin_where_the_graph_has_it(older: bool, tmp_path: Path) -> None:
    drafter = tiny_drafter(causal=True)
    path, config = emitted(drafter, None, tmp_path), drafter.config
    if older:
        core = ov.Core()
        core.get_versions("CPU")
        model = core.read_model(path)
        model.remove_result(model.output("margin").get_node())
        path = tmp_path / "older.xml"
        ov.save_model(model, path, compress_to_fp16=False)
    features, tables = drafter.random_features(9, seed=1), (np.arange(2, dtype=np.int32),)
    draft = load_drafter(path, drafter).propose(
        DraftInput(np.array([5], np.int32), np.zeros(1, np.int32), ((features,),), tables)
    )
    expected = draft_block(features, 5, config, drafter.weights, drafter.embedding, drafter.head)
    np.testing.assert_array_equal(draft.tokens[0], expected.tokens)
    if older:
        assert draft.margin is None
    else:
        np.testing.assert_allclose(draft.margin[0], margin_of(expected.logits), atol=TOLERANCE)


def load_drafter(path: Path, drafter: TinyDrafter) -> OpenVinoDrafter:
    core = ov.Core()
    core.get_versions("CPU")
    graph = _Graph(core, path, {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"})
    graph.allocate_cache(drafter.config.layers, 2, ov.Type.f32)
    limits = Limits(
        max_batch=1,
        max_len=64,
        draft_length=drafter.config.draft_length,
        vocab_size=len(drafter.embedding),
        block_size=32,
        num_blocks=2,
        feature_size=drafter.weights["fc.weight"].shape[1],
    )
    return OpenVinoDrafter(graph, limits, drafter.config.mask_token_id, causal=True)


def margin_of(logits: np.ndarray) -> np.ndarray:
    """By how much the best token's probability exceeds the next one's, over the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probability = np.sort(weights / weights.sum(axis=-1, keepdims=True), axis=-1)
    return probability[..., -1] - probability[..., -2]


def emitted(drafter: TinyDrafter, vocab: np.ndarray | None, folder: Path) -> Path:
    path = folder / "drafter.xml"
    head = drafter.head if vocab is None else drafter.head[vocab]
    emit_drafter(drafter.config, drafter.weights, drafter.embedding, head, vocab, "fp32", 256, path)
    return path
