"""Runs emitted OpenVINO graphs on ragged batches, with paged caches as docs/graphs.md describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from dcut_engines.model_config import DrafterConfig
from dcut_trt.backends.openvino import restore_head_info

Arrays = dict[str, NDArray[Any]]
BLOCK_SIZE = 32


def i32(values: Any) -> NDArray[np.int32]:
    return np.asarray(values, dtype=np.int32)


def ragged(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Where each request's rows begin, and how many there are in all: [B + 1]."""
    return i32(np.cumsum([0, *lengths]))


class PagedRunner:
    """One compiled graph with the KV blocks of up to `requests` requests of up to `max_len` rows each."""

    def __init__(self, path: Path, *, requests: int = 3, max_len: int = 128, precision: str = "f32") -> None:
        core = ov.Core()
        core.get_versions("CPU")  # loads the plugin, and with it the paged attention op that the file names
        model = core.read_model(path)
        restore_head_info(model)
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": 1,
        }
        self.compiled = core.compile_model(model, "CPU", settings)
        self.request = self.compiled.create_infer_request()
        blocks = -(-max_len // BLOCK_SIZE)
        # a request's blocks are no neighbours, and hold large values at first, so that a stray read shows
        self.block_tables = i32(np.random.default_rng(0).permutation(requests * blocks).reshape(requests, blocks))
        for port in self.compiled.inputs:
            if "_cache." in port.any_name:
                shape = [requests * blocks, *(size.get_length() for size in list(port.partial_shape)[1:])]
                cache = ov.Tensor(port.element_type, ov.Shape(shape))
                cache.data.fill(1e4)
                self.request.set_tensor(port.any_name, cache)

    def pages(
        self, requests: Sequence[int], past: Sequence[int], new: Sequence[int], *, prefix: str = "", spare: int = 0
    ) -> Arrays:
        """The page-table inputs when requests[i] holds past[i] rows and gets new[i], with `spare` blocks too many."""
        ends = [p + n for p, n in zip(past, new, strict=True)]
        tables = [self.block_tables[r][: -(-end // BLOCK_SIZE) + spare] for r, end in zip(requests, ends, strict=True)]
        inputs = {
            "past_lens": i32(past),
            "subsequence_begins": ragged(new),
            "block_indices": np.concatenate(tables),
            "block_indices_begins": ragged([len(table) for table in tables]),
            "max_context_len": i32(max(ends)),
        }
        return {prefix + name: value for name, value in inputs.items()}

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        for name, value in inputs.items():
            self.request.set_tensor(name, ov.Tensor(value))
        self.request.infer()
        return {port.any_name: self.request.get_tensor(port).data.copy() for port in self.compiled.outputs}


@dataclass(frozen=True, slots=True)
class TargetRows:
    """New rows of one request: `tokens` at positions past, past + 1, ..."""

    request: int
    past: int
    tokens: Sequence[int]


def run_target(
    runner: PagedRunner,
    rows: Sequence[TargetRows],
    *,
    head_rows: Sequence[int] | None = None,
    logit_rows: Sequence[int] | None = None,
    spare: int = 0,
) -> Arrays:
    """One target call; head_rows: every row unless given, logit_rows: every head row unless given."""
    new = [len(row.tokens) for row in rows]
    heads = range(sum(new)) if head_rows is None else head_rows
    return runner.run(
        {
            "token_ids": i32(np.concatenate([row.tokens for row in rows])),
            "positions": i32(np.concatenate([row.past + np.arange(len(row.tokens)) for row in rows])),
            "head_rows": i32(heads),
            "logit_rows": i32(range(len(heads)) if logit_rows is None else logit_rows),
            **runner.pages([row.request for row in rows], [row.past for row in rows], new, spare=spare),
        }
    )


@dataclass(frozen=True, slots=True)
class DraftRows:
    """New context of one request, features [C_i, F] at positions past, past + 1, ..., and the anchor behind them."""

    request: int
    past: int
    features: NDArray[np.float32]
    anchor: int


def run_drafter(
    runner: PagedRunner, config: DrafterConfig, rows: Sequence[DraftRows]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """One drafter call: tokens and confidence, each [B, D]."""
    block_size, count = config.block_size, len(rows) * config.block_size
    contexts = [len(row.features) for row in rows]
    order: list[int] = []
    block_rows: list[int] = []
    last_rows: list[int] = []
    for request, (begin, context) in enumerate(zip(ragged(contexts), contexts, strict=False)):
        order += range(begin, begin + context)
        block_rows += range(len(order), len(order) + block_size)
        first = sum(contexts) + request * block_size
        order += range(first, first + block_size)
        last_rows += [len(order) - 1] * block_size
    query_rows = np.zeros(len(order), np.int32)
    query_rows[block_rows] = np.arange(count)
    new = [context + block_size for context in contexts]
    positions = [row.past + np.arange(length) for row, length in zip(rows, new, strict=True)]
    requests, past = [row.request for row in rows], [row.past for row in rows]
    inputs = {
        "features": np.concatenate([row.features for row in rows]),
        "block_ids": i32([[row.anchor] + [config.mask_token_id] * config.draft_length for row in rows]).ravel(),
        "order": i32(order),
        "block_rows": i32(block_rows),
        "query_rows": query_rows,
        "positions": i32(np.concatenate(positions)),
        "draft_rows": i32([row for row in range(count) if row % block_size]),
        **runner.pages(requests, past, new),
    }
    if not config.causal:
        ends = np.repeat([p + n - 1 for p, n in zip(past, new, strict=True)], block_size)
        read = runner.pages(np.repeat(requests, block_size), ends, [1] * count, prefix="read_")
        inputs |= {"last_rows": i32(last_rows), **read}
    outputs = runner.run(inputs)
    return outputs["tokens"].reshape(len(rows), -1), outputs["confidence"].reshape(len(rows), -1)
