"""How many drafts the target would accept on text that was never trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcut_engines.train.blocks import Example, IntArray, make_batch
from dcut_engines.train.drafting import TorchDrafter
from dcut_engines.train.examples import Pool

BLOCKS_PER_CALL = 64


@dataclass(frozen=True, slots=True)
class Acceptance:
    """blocks: how many were drafted.  tau: accepted drafts + 1, the tokens of a step, over anchors everywhere.

    decoded_tau: the same over the anchors that decoding would stop at; None where only some anchors were drafted.
    accuracy: [D] share of drafts at offset k that are the target's token; accepted: [D] with all drafts before them.
    """

    blocks: int
    tau: float
    decoded_tau: float | None
    accuracy: tuple[float, ...]
    accepted: tuple[float, ...]


def measure_acceptance(drafter: TorchDrafter, pool: Pool, anchors_per_sequence: int | None = None) -> Acceptance:
    """Draft from every response position of the pool, or from so many of each sequence, evenly spread."""
    matches, walked = [], []
    for index in range(len(pool)):
        places = pool.anchors(index)
        if anchors_per_sequence is not None and len(places) > anchors_per_sequence:
            places = places[np.linspace(0, len(places) - 1, anchors_per_sequence).round().astype(int)]
        match = np.concatenate([_matches(drafter, part) for part in _parts(pool, index, places)])
        matches.append(match)
        if anchors_per_sequence is None:
            walked.extend(decoding_steps(accepted_lengths(match)))
    match = np.concatenate(matches)  # [blocks, D]
    prefixes = match.cumprod(axis=1)
    return Acceptance(
        blocks=len(match),
        tau=1 + float(prefixes.sum(axis=1).mean()),
        decoded_tau=1 + float(np.mean(walked)) if walked else None,
        accuracy=tuple(match.mean(axis=0).tolist()),
        accepted=tuple(prefixes.mean(axis=0).tolist()),
    )


def accepted_lengths(match: NDArray[np.bool_]) -> IntArray:
    """The drafts before the first wrong one: [blocks, D] -> [blocks]."""
    lengths: IntArray = match.cumprod(axis=1).sum(axis=1)
    return lengths


def decoding_steps(accepted: Sequence[int] | IntArray) -> list[int]:
    """What each step of decoding one response accepts, when accepted[i] drafts are right behind its i-th token."""
    steps, place = [], 0
    while place < len(accepted):
        steps.append(int(accepted[place]))
        place += steps[-1] + 1
    return steps


def _parts(pool: Pool, index: int, places: IntArray) -> Iterator[Example]:
    for first in range(0, len(places), BLOCKS_PER_CALL):
        yield pool.example(index, places[first : first + BLOCKS_PER_CALL])


def _matches(drafter: TorchDrafter, example: Example) -> NDArray[np.bool_]:
    batch = make_batch([example], drafter.config, drafter.ids.device)
    tokens, _ = drafter.draft(batch)
    matches: NDArray[np.bool_] = (tokens == batch.labels).cpu().numpy()
    return matches
