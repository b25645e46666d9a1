"""The target's hidden states in torch, against transformers', and their cache on disk."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from tiny_targets import TinyTarget, tiny_llama, tiny_qwen3

from dcut_engines.checkpoint import TargetCheckpoint
from dcut_engines.train.corpus import Corpus, make_corpus
from dcut_engines.train.features import FeatureCache, TargetFeatures, cached_features, load_features

CPU = torch.device("cpu")
LAYERS = (0, 1)


@pytest.fixture(params=[tiny_llama, tiny_qwen3], ids=["llama", "qwen3"])
def tiny(request: pytest.FixtureRequest) -> TinyTarget:
    return request.param()


def features_of(tiny: TinyTarget) -> TargetFeatures:
    target = TargetCheckpoint("tiny", "0", tiny.config, tiny.weights, tokenizer=None)  # type: ignore[arg-type]
    return load_features(target, LAYERS, max_len=128, precision=torch.float32, device=CPU)


def corpus() -> Corpus:
    rng = np.random.default_rng(0)
    lengths = (40, 2, 90, 17)
    return make_corpus([rng.integers(0, 97, length).tolist() for length in lengths], [1] * len(lengths))


def test_packed_sequences_have_the_features_of_transformers(tiny: TinyTarget) -> None:
    text = corpus()
    rows = features_of(tiny).rows(text.tokens, text.lengths.tolist()).float().numpy()
    for index, start in enumerate(text.starts.tolist()):
        expected = tiny.features(text.sequence(index).tolist(), LAYERS)
        found = rows[start : start + text.lengths[index]]
        np.testing.assert_allclose(found, expected, rtol=2**-8, atol=1e-4)  # stored as bf16


def test_features_are_computed_once_for_each_text_and_layers(tmp_path: Path) -> None:
    tiny, text = tiny_llama(), corpus()
    width = len(LAYERS) * tiny.config.hidden_size

    def cached(of: Corpus, load: object = lambda: features_of(tiny), target: str = "a") -> FeatureCache:
        return cached_features(tmp_path, target, of, load, LAYERS, width)  # type: ignore[arg-type]

    def never() -> NoReturn:
        raise AssertionError("computed again")

    first = cached(text)
    again = cached(text, never)
    assert torch.equal(first.sequence(42, 90), again.sequence(42, 90))
    for call in (lambda: cached(make_corpus([[1, 2, 3]], [1]), never), lambda: cached(text, never, "b")):
        with pytest.raises(AssertionError, match="computed again"):
            call()
    assert not list(tmp_path.glob("*.partial")) or len(list(tmp_path.glob("*.bf16"))) == 1
