"""The drafter of a TensorRT bundle: drafts for all requests in one call, and packs what the target is to verify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcut_trt.backends.tensorrt_features import ResidentRows, resident, row_indices, split
from dcut_trt.backends.tensorrt_memory import Memory, slot_of
from dcut_trt.backends.tensorrt_pack import ResidentPlan, begins
from dcut_trt.backends.tensorrt_plan import Plan
from dcut_trt.spec.packing import budget
from dcut_trt.stage_types import Draft, DraftInput, Offer
from dcut_trt.types import FloatArray, IntArray

Pieces = list[ResidentRows]


class TensorRtDrafter:
    """The drafter behind the Drafter protocol."""

    def __init__(self, plan: Plan, target: Plan, memory: Memory, *, prefill_chunk: int, pad: bool) -> None:
        """target: the plan whose buckets a budget is rounded up to.  prefill_chunk: rows of the longest prefill.

        pad: run over as many context rows as a step can leave, so that the shapes of a call follow from its batch and
        its CUDA graph holds from step to step; the rows too many belong to nobody.
        """
        self._plan = plan
        self._target = target
        self._memory = memory
        self._prefill_chunk = prefill_chunk
        self._pad = pad
        (self._ratios,) = plan.tensors["budgets"].shape({})
        drafts = plan.tensors["tokens"].dims[1]
        assert isinstance(drafts, int)
        self._block = drafts + 1
        self._rows_of: dict[tuple[float, int], int] = {}

    @property
    def network_ms(self) -> float:
        return self._plan.meter.network_ms

    def close(self) -> None:
        self._plan.close()

    def propose(self, drafts: DraftInput) -> Draft:
        """Append all new features; draft, and pack where the offer can be followed here, unless only feeding."""
        batch = len(drafts.anchors)
        nothing = np.empty((batch, 0), np.int32), np.empty((batch, 0), np.float32)
        pieces = [resident(request) for request in drafts.features]
        if drafts.feed_only:
            for request, past, table in zip(pieces, drafts.context_lens, drafts.block_tables, strict=True):
                self._feed(request, int(past), self._memory.slots.row(slot_of(table)))
            return Draft(*nothing)
        row_of = self._memory.arrange(drafts.block_tables)
        counts = np.array([sum(map(len, request)) for request in pieces], np.int32)  # [B]
        past_lens, kv_lens = drafts.context_lens.copy(), drafts.context_lens + counts
        for row in np.flatnonzero(counts > self._block).tolist():
            # A draft call has room for what a step commits; the rows of a prompt go ahead of it.
            ahead, pieces[row] = split(pieces[row], int(counts[row]) - self._block)
            past_lens[row] += self._feed(ahead, int(past_lens[row]), int(row_of[row]))
        offer = drafts.offer if drafts.offer and len(drafts.offer.ratios) <= self._ratios else None
        budgets = [self._budget(ratio, batch) for ratio in offer.ratios] if offer else []
        self._draft(drafts.anchors, past_lens, kv_lens, pieces, row_of, self._choice(budgets, offer))
        if offer is None:
            return self._read(row_of)
        plan = ResidentPlan(self._memory, self._plan.meter, offer, budgets, row_of, kv_lens, self._block)
        return Draft(*nothing, plan)

    def _feed(self, pieces: Pieces, past: int, row: int) -> int:
        """Append features to one request's context, which has `past` rows; returns how many."""
        done = 0
        while pieces:
            head, pieces = split(pieces, self._prefill_chunk)
            count = sum(map(len, head))
            start = past + done
            arrays = {
                "context_positions": np.arange(start, start + count, dtype=np.int32),
                "context_begins": np.array([0, count], np.int32),
                "write_indices": np.array([start], np.int32),
                "anchor_positions": np.array([start + count], np.int32),
            }
            self._upload(head, arrays)
            context = self._plan.select("prefill", {"C": count, "B": 1})
            sizes = {"C": count, "B": 1, "B_plus_1": 2, "W": count + self._block}
            self._plan.run(context, sizes, self._memory.drafter_cache.addresses(row))
            done += count
        return done

    def _draft(
        self,
        anchors: IntArray,
        past_lens: IntArray,
        kv_lens: IntArray,
        pieces: list[Pieces],
        row_of: IntArray,
        choice: Mapping[str, NDArray[Any]],
    ) -> None:
        """Enqueue one call over all requests, in the order of their cache rows.

        past_lens, kv_lens: [B] context rows without and with the features of `pieces`; an anchor stands after them.
        """
        batch = len(anchors)
        of_row = np.argsort(row_of)
        ordered = [piece for row in of_row for piece in pieces[row]]
        past, lengths = past_lens[of_row], (kv_lens - past_lens)[of_row]
        first = begins(lengths)
        count = int(first[-1])
        arrays = {
            "anchors": anchors[of_row],
            "anchor_positions": kv_lens[of_row],
            "write_indices": past,
            "context_begins": first,
            "context_positions": np.arange(count, dtype=np.int32) + np.repeat(past - first[:-1], lengths),
        }
        self._upload(ordered, {**arrays, **choice})
        contexts = batch * self._block if self._pad else count
        context = self._plan.select("draft", {"B": batch, "C": contexts})
        window = context.profile.dims["W"][2]
        self._plan.run(context, {"C": contexts, "B": batch, "B_plus_1": batch + 1, "W": window})

    def _upload(self, pieces: Pieces, arrays: Mapping[str, NDArray[Any]]) -> None:
        memory = self._memory
        memory.step.upload({**arrays, "feature_rows": row_indices(pieces)})
        memory.features.gather(memory.drafter_features, pieces, memory.step.parts["feature_rows"])

    def _choice(self, budgets: list[int], offer: Offer | None) -> dict[str, NDArray[Any]]:
        """The pack node's budgets and costs [R]; no bucket of infinite cost is ever chosen."""
        costs: FloatArray = np.full(self._ratios, np.inf, np.float32)
        rows = np.zeros(self._ratios, np.int32)
        if offer is not None:
            costs[: len(budgets)] = offer.cost_ms
            rows[: len(budgets)] = budgets
        return {"budgets": rows, "cost_ms": costs}

    def _budget(self, ratio: float, batch: int) -> int:
        """K_rho(B), or all that the smallest token bucket for it takes: the target computes those rows anyhow."""
        if (ratio, batch) not in self._rows_of:
            wanted = budget(ratio, batch, self._block)
            bucket = self._target.select("verify", {"K": wanted, "B": batch}).rows_for(wanted)
            self._rows_of[ratio, batch] = min(bucket, batch * self._block)
        return self._rows_of[ratio, batch]

    def _read(self, row_of: IntArray) -> Draft:
        """Tokens and confidence, for a policy that selects on the host."""
        transfers, io = self._memory.transfers, self._memory.drafter_io
        shape = (len(row_of), self._block - 1)
        tokens = transfers.download(io["tokens"], np.int32, shape)
        confidence = transfers.download(io["confidence"], np.float32, shape)
        meter = self._plan.meter
        return Draft(tokens.read(meter)[row_of], confidence.read(meter)[row_of])
