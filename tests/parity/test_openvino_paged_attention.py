"""OpenVINO's private paged attention op: fails here first when a new version reads its 28 inputs differently."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
from graph_runner import PagedRunner
from numpy.typing import NDArray
from tiny_targets import tiny_llama

from dcut_engines.emit_openvino import PagedGraph

FloatArray = NDArray[np.float32]


def test_it_attends_causally_over_ragged_paged_rows(tmp_path: Path) -> None:
    config = tiny_llama().config
    graph = PagedGraph(config, {}, "fp32", 1)
    query_width, width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    query = graph.parameter("query", [-1, query_width], ov.Type.f32)
    key, value = (graph.parameter(name, [-1, width], ov.Type.f32) for name in ("key", "value"))
    graph.save({"attended": graph.attend(query, key, value, 0)}, tmp_path / "attention.xml")
    runner = PagedRunner(tmp_path / "attention.xml")

    rng = np.random.default_rng(0)
    query_rows = [rng.standard_normal((70, query_width), dtype=np.float32) for _ in range(3)]
    kv_rows = [rng.standard_normal((2, 70, width), dtype=np.float32) for _ in range(3)]
    past = [0, 0, 0]
    for ends in ([40, 1, 32], [41, 9, 33], [70, 33, 64]):
        new = [slice(p, end) for p, end in zip(past, ends, strict=True)]
        inputs = {
            "query": np.concatenate([rows[s] for rows, s in zip(query_rows, new, strict=True)]),
            "key": np.concatenate([rows[0, s] for rows, s in zip(kv_rows, new, strict=True)]),
            "value": np.concatenate([rows[1, s] for rows, s in zip(kv_rows, new, strict=True)]),
            **runner.pages([0, 1, 2], past, [s.stop - s.start for s in new]),
        }
        expected = [
            causal_attention(q[: s.stop], kv[0, : s.stop], kv[1, : s.stop], config.heads, config.kv_heads)[s]
            for q, kv, s in zip(query_rows, kv_rows, new, strict=True)
        ]
        np.testing.assert_allclose(
            runner.run(inputs)["attended"],
            np.concatenate(expected),
            atol=1e-5,
            err_msg=f"OpenVINO {ov.__version__} computes another paged attention",
        )
        past = ends


def causal_attention(query: FloatArray, key: FloatArray, value: FloatArray, heads: int, kv_heads: int) -> FloatArray:
    """One request, dense: [n, heads * head_dim] -> the same."""
    rows = len(query)
    q = query.reshape(rows, heads, -1).transpose(1, 0, 2)
    k, v = (array.reshape(rows, kv_heads, -1).transpose(1, 0, 2).repeat(heads // kv_heads, 0) for array in (key, value))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    scores[:, np.triu(np.ones((rows, rows), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended: FloatArray = (weights / weights.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(rows, -1)
    return attended
