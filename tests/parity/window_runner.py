"""Runs emitted ONNX graphs under ONNX Runtime, with the caches that docs/graphs.md describes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime as ort
from graph_runner import Arrays, i32, ragged
from numpy.typing import NDArray

KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class WindowRunner:
    """One graph and the caches of `batch` requests, each with max_len slots."""

    def __init__(self, path: Path, batch: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # below: one warning per TensorScatter that it copies the cache
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self._start(batch)

    def anew(self, batch: int) -> Self:
        """The same graph for `batch` requests with empty caches."""
        runner = copy.copy(self)
        runner._start(batch)
        return runner

    def _start(self, batch: int) -> None:
        self.batch = batch
        self.caches: Arrays = {
            name: np.zeros((batch, *value.shape[1:]), KINDS[value.type])
            for name, value in self.inputs.items()
            if "_cache." in name
        }

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> Arrays:
        """All outputs but the caches, which stay for the next call."""
        names = [value.name for value in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, {**feeds, **self.caches}), strict=True))
        self.caches = {name: outputs.pop(name.replace("_cache.", "_cache_out.")) for name in self.caches}
        return outputs

    def poison(self, lengths: Sequence[int], seed: int) -> None:
        """Overwrite every slot past each request's own with large noise."""
        rng = np.random.default_rng(seed)
        for cache in self.caches.values():
            for row, length in enumerate(lengths):
                cache[row, :, length:] = 1e3 * rng.standard_normal(cache[row, :, length:].shape)

    def target(
        self, chunks: Sequence[Sequence[int]], starts: Sequence[int], padding: int = 0, window: int | None = None
    ) -> Arrays:
        """Feed chunks[b] to request b from slot starts[b], all rows with logits; padding adds rows of no request.

        window: W of a graph that lets its calls choose; None is the longest chunk.
        """
        lengths = [len(chunk) for chunk in chunks]
        depths = [depth for length in lengths for depth in range(length)]
        rows = np.repeat(np.arange(self.batch), lengths)
        feeds = {
            "token_ids": i32([token for chunk in chunks for token in chunk] + [0] * padding),
            "positions": i32([*(np.asarray(starts)[rows] + depths), *[0] * padding]),
            "request_rows": i32([*rows, *[0] * padding]),
            "depths": i32(depths + [0] * padding),
            "subsequence_begins": ragged(lengths),
            "write_indices": i32(starts),
            "head_rows": i32(range(len(depths))),
            "logit_rows": i32(range(len(depths))),
        }
        if "window_offsets" in self.inputs:
            feeds["window_offsets"] = i32(range(window or max(lengths)))
        return self.run(feeds)

    def drafter(
        self,
        contexts: Sequence[NDArray[np.float32]],
        anchors: Sequence[int],
        starts: Sequence[int],
        block_size: int,
        pack: Mapping[str, NDArray[Any]] | None = None,
    ) -> Arrays:
        """Append contexts[b] [c, F] from slot starts[b], and draft after anchors[b].

        pack: what a pack node at the graph's tail takes besides.
        """
        lengths = [len(context) for context in contexts]
        feeds = {
            "features": np.concatenate(contexts).astype(KINDS[self.inputs["features"].type]),
            "context_positions": i32(
                [start + depth for start, n in zip(starts, lengths, strict=True) for depth in range(n)]
            ),
            "context_begins": ragged(lengths),
            "anchors": i32(anchors),
            "write_indices": i32(starts),
            "window_offsets": i32(range(max(lengths) + block_size)),
            **(pack or {}),
        }
        return self.run(feeds)
