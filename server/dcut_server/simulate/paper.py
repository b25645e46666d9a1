"""The paper's evaluation (D-cut, arXiv 2607.14647): what it reports, and the same cells simulated."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcut_server.simulate.generator import Shape, generate
from dcut_server.simulate.statistics import BlockStatistics
from dcut_server.simulate.traces import Trace

DATASETS = ("gsm8k", "humaneval", "mt-bench")
DEVICES = ("h20", "h800")
CONCURRENCY = (16, 32, 64)
METHODS = ("ratio:0.25", "ratio:0.5", "ratio:0.75", "dcut")
DRAFT_LENGTH = 15
REQUESTS, POSITIONS = 256, 256  # of a generated trace

# DFlash's published throughput is lower than its profiled steps make it, by a fifth on H20 and a third on H800. Prompts
# take time per token, whatever the policy; longer contexts and the host stretch the steps. Nothing tells how much is
# which, so each is taken to be half.
PER_TOKEN = 0.5

# Qwen3-8B with its DFlash drafter, concurrency 32: mean accepted tokens (the target's own counts), Spearman, AUROC.
BLOCKS = {
    "gsm8k": BlockStatistics(6.10, 0.748, 0.957),
    "humaneval": BlockStatistics(6.41, 0.770, 0.962),
    "mt-bench": BlockStatistics(3.19, 0.579, 0.972),
}
DCUT_TOKENS = {"gsm8k": 5.68, "humaneval": 5.77, "mt-bench": 3.01}  # mean accepted tokens of D-cut, the same set-up

# Table 2: tokens per second by device and method; GSM8K, HumanEval, MT-Bench, each at concurrency 16, 32, 64.
_THROUGHPUT = {
    ("h20", "dflash"): (2115, 2200, 2285, 2221, 2268, 2346, 1167, 1220, 1261),
    ("h20", "ratio:0.25"): (2764, 3014, 3123, 2754, 2972, 3127, 2152, 2377, 2564),
    ("h20", "ratio:0.5"): (2891, 3114, 3147, 3005, 3179, 3351, 1729, 1856, 1941),
    ("h20", "ratio:0.75"): (2427, 2618, 2630, 2463, 2716, 2796, 1355, 1442, 1514),
    ("h20", "dcut"): (2961, 3175, 3320, 3035, 3250, 3333, 2169, 2449, 2600),
    ("h800", "dflash"): (5963, 7912, 7908, 6492, 8167, 8076, 3159, 4147, 4245),
    ("h800", "ratio:0.25"): (4814, 5479, 6143, 4735, 7251, 9520, 3387, 5495, 7126),
    ("h800", "ratio:0.5"): (6615, 9780, 10824, 6799, 9527, 10831, 3562, 5185, 6041),
    ("h800", "ratio:0.75"): (6541, 8661, 9551, 6809, 8962, 9827, 3404, 4594, 5049),
    ("h800", "dcut"): (6391, 9663, 11194, 6823, 9737, 11347, 3469, 5253, 6894),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A cell of Table 2: how many times DFlash's throughput, as published and as simulated.

    dflash_ms, method_ms: simulated milliseconds of steps per token.  other_ms: of DFlash's published time per token,
    what its steps do not account for.
    """

    device: str
    dataset: str
    concurrency: int
    method: str
    published: float
    dflash_ms: float
    method_ms: float
    other_ms: float

    def simulated(self, per_token: float = PER_TOKEN) -> float:
        """per_token: the share of other_ms that each token takes; the rest grows with the time of steps."""
        stretched = 1 + (1 - per_token) * self.other_ms / self.dflash_ms
        return (self.dflash_ms + self.other_ms) / (self.method_ms * stretched + per_token * self.other_ms)

    def error(self, per_token: float = PER_TOKEN) -> float:
        """Relative, positive where the simulation promises more."""
        return self.simulated(per_token) / self.published - 1


def published_tokens_per_s(device: str, dataset: str, concurrency: int, method: str) -> float:
    place = DATASETS.index(dataset) * len(CONCURRENCY) + CONCURRENCY.index(concurrency)
    return _THROUGHPUT[device, method][place]


def compare(device: str, dataset: str, concurrency: int, method: str, dflash_ms: float, method_ms: float) -> Comparison:
    """A cell, from simulated milliseconds per token of DFlash's steps and of the method's."""
    whole_ms = 1e3 / published_tokens_per_s(device, dataset, concurrency, "dflash")
    published = published_tokens_per_s(device, dataset, concurrency, method) * whole_ms / 1e3
    other_ms = max(whole_ms - dflash_ms, 0.0)
    return Comparison(device, dataset, concurrency, method, published, dflash_ms, method_ms, other_ms)


def fitted_shapes() -> dict[str, Shape]:
    """What `python -m dcut_server.simulate.fit` found for each dataset."""
    raw = json.loads((Path(__file__).parent / "fitted.json").read_text(encoding="utf-8"))
    return {name: Shape(**entry["shape"]) for name, entry in raw.items()}


@functools.lru_cache(maxsize=8)
def paper_trace(dataset: str, seed: int = 0, requests: int = REQUESTS, positions: int = POSITIONS) -> Trace:
    """Texts drawn from the generator as it was fitted to this dataset."""
    shape = fitted_shapes()[dataset]
    return generate(shape, draft_length=DRAFT_LENGTH, requests=requests, positions=positions, seed=seed, name=dataset)


def within(errors: Sequence[float], limit: float) -> int:
    """How many are off by no more than this share."""
    return sum(abs(error) <= limit for error in errors)


def median_error(errors: Sequence[float]) -> float:
    return float(np.median(np.abs(errors)))
