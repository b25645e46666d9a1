"""The target of a TensorRT bundle: verification by token bucket, plain decoding, and prefill prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dcut_trt.backends.base import Limits
from dcut_trt.backends.tensorrt_device import Download
from dcut_trt.backends.tensorrt_memory import Memory, row_step, slot_of
from dcut_trt.backends.tensorrt_pack import ResidentPlan, begins, packed_rows
from dcut_trt.backends.tensorrt_plan import OutsideProfile, Plan, ProfileContext
from dcut_trt.stage_types import Rows, Verified
from dcut_trt.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Piece:
    """Packed rows first .. last of one prompt, after `past` tokens of it in cache row `cache_row`."""

    first: int
    last: int
    past: int
    cache_row: int

    @property
    def count(self) -> int:
        return self.last + 1 - self.first


class TensorRtTarget:
    """The target behind the Target protocol.

    Features stay on the device, so hidden states that are NaN are noticed only where a request needs logits.
    """

    def __init__(self, plan: Plan, memory: Memory, limits: Limits, prefill_chunk: int) -> None:
        """prefill_chunk: rows of the longest prefill that the plan takes."""
        self.limits = limits
        self._plan = plan
        self._memory = memory
        self._prefill_chunk = prefill_chunk

    @property
    def network_ms(self) -> float:
        return self._plan.meter.network_ms

    def forward(self, rows: Rows, head_rows: IntArray, logit_rows: IntArray) -> Verified:
        self._memory.features.make_way()
        if rows.prompt:
            return self._prefill(rows, head_rows, logit_rows)
        if isinstance(rows.resident, ResidentPlan):
            return self._verify_resident(rows, rows.resident, head_rows, logit_rows)
        return self._verify(rows, head_rows, logit_rows)

    def close(self) -> None:
        self._plan.close()

    def _verify_resident(self, rows: Rows, plan: ResidentPlan, head_rows: IntArray, logit_rows: IntArray) -> Verified:
        """Verify rows that stand in the target's inputs already; the host knows no more of them than their number."""
        assert np.array_equal(rows.past_lens, plan.kv_lens), "the drafter was told other positions than the target"
        context = self._plan.select("verify", {"K": plan.size, "B": len(plan.row_of)})
        bucket = context.rows_for(plan.size)
        for name in ("request_rows", "depths") if bucket > plan.size else ():
            # Rows too many belong to nobody; what stands there may name a request that is not in the call.
            part = self._memory.packed.parts[name].part(4 * plan.size, 4 * (bucket - plan.size))
            self._memory.device.clear(part)
        packed_logits = plan.packed_of[head_rows[logit_rows]] if len(logit_rows) else logit_rows
        argmax, logits = self._run(context, bucket, len(plan.row_of), packed_logits)
        plan.request()
        answer = argmax.read(self._plan.meter)
        return self._verified(answer[plan.packed_of], plan.packed_of, logits)

    def _verify(self, rows: Rows, head_rows: IntArray, logit_rows: IntArray) -> Verified:
        """Verify rows that the host has packed; one row per request is plain decoding."""
        row_of = self._memory.arrange(rows.block_tables)
        lengths = np.diff(rows.cu_lens).astype(np.int32)  # [B]
        batch, count = len(lengths), len(rows.token_ids)
        assert len(head_rows) == count, "all rows of a verification are heads"
        kind = "decode" if count == batch else "verify"
        context = self._plan.select(kind, {"K": count, "B": batch})
        bucket = context.rows_for(count)
        packed_of = packed_rows(row_of, lengths)
        past = np.empty_like(rows.past_lens)
        past[row_of] = rows.past_lens
        depths = np.arange(count, dtype=np.int32) - np.repeat(rows.cu_lens[:-1], lengths)
        columns = {
            "token_ids": rows.token_ids,
            "positions": rows.positions,
            "request_rows": np.repeat(row_of, lengths),
            "depths": depths,
        }
        order = np.argsort(packed_of)
        by_row = np.empty_like(lengths)
        by_row[row_of] = lengths
        packed = {name: column[order] for name, column in columns.items()}
        self._memory.packed.upload({**packed, "subsequence_begins": begins(by_row)})
        self._memory.step.upload({"anchor_positions": past})
        argmax, logits = self._run(context, bucket, batch, packed_of[head_rows[logit_rows]])
        return self._verified(argmax.read(self._plan.meter)[packed_of], packed_of, logits)

    def _run(
        self, context: ProfileContext, rows: int, batch: int, logit_rows: IntArray
    ) -> tuple[Download, Download | None]:
        """Enqueue one decode or verify call over all its rows, and the way back of its answers."""
        memory, sampled = self._memory, len(logit_rows)
        if sampled:
            memory.heads.upload({"logit_rows": logit_rows})
        window = context.profile.dims["W"][2]
        sizes = {"K": rows, "B": batch, "B_plus_1": batch + 1, "W": window, "H": rows, "S": sampled}
        self._plan.run(context, sizes)
        argmax = memory.transfers.download(memory.target_io["argmax"], np.int32, (rows,))
        return argmax, self._logits(sampled) if sampled else None

    def _logits(self, count: int) -> Download:
        shape = (count, self.limits.vocab_size)
        return self._memory.transfers.download(self._memory.target_io["logits"], np.float32, shape)

    def _verified(self, argmax: IntArray, packed_of: IntArray, logits: Download | None) -> Verified:
        values = self._no_logits() if logits is None else logits.read(self._plan.meter)
        return Verified(argmax, self._memory.features.rows(packed_of), values)

    def _no_logits(self) -> FloatArray:
        return np.empty((0, self.limits.vocab_size), np.float32)

    def _prefill(self, rows: Rows, head_rows: IntArray, logit_rows: IntArray) -> Verified:
        """Every prompt part alone, over its own cache row; answers are waited for only where a prompt ends."""
        heads = set(head_rows.tolist())
        sampled = {int(head_rows[index]) for index in logit_rows}
        store = self._memory.features
        feature_rows: list[IntArray] = []
        argmaxes: list[Download] = []
        logits: list[Download] = []
        place = 0  # row of the feature output where the next piece's go
        for piece in self._pieces(rows):
            place = -(-place // row_step(store.width)) * row_step(store.width)
            if place + piece.count > store.capacity:
                raise OutsideProfile(f"prefill of {len(rows.token_ids)} rows: memory is there for {store.capacity}")
            self._run_piece(rows, piece, place, logits=piece.last in sampled)
            feature_rows.append(np.arange(place, place + piece.count, dtype=np.int32))
            place += piece.count
            if piece.last in heads:
                argmaxes.append(self._memory.transfers.download(self._memory.target_io["argmax"], np.int32, (1,)))
            if piece.last in sampled:
                logits.append(self._logits(1))
        meter = self._plan.meter
        argmax = np.array([download.read(meter)[0] for download in argmaxes], np.int32)
        values = [self._no_logits(), *(download.read(meter) for download in logits)]
        return Verified(argmax, store.rows(np.concatenate(feature_rows)), np.concatenate(values))

    def _pieces(self, rows: Rows) -> Iterator[Piece]:
        """Every call of a prefill: at most prefill_chunk rows, of one prompt."""
        for index, table in enumerate(rows.block_tables):
            begin, end = int(rows.cu_lens[index]), int(rows.cu_lens[index + 1])
            for first in range(begin, end, self._prefill_chunk):
                past = int(rows.past_lens[index]) + first - begin
                cache_row = self._memory.slots.fill(slot_of(table), past)
                yield Piece(first, min(first + self._prefill_chunk, end) - 1, past, cache_row)

    def _run_piece(self, rows: Rows, piece: Piece, place: int, *, logits: bool) -> None:
        memory, count, part = self._memory, piece.count, slice(piece.first, piece.last + 1)
        memory.packed.upload(
            {
                "token_ids": rows.token_ids[part],
                "positions": rows.positions[part],
                "depths": np.arange(count, dtype=np.int32),
                "subsequence_begins": np.array([0, count], np.int32),
            }
        )
        memory.step.upload({"anchor_positions": np.array([piece.past], np.int32)})
        memory.heads.upload({"head_rows": np.array([count - 1], np.int32)})  # and logit_rows = [0]
        context = self._plan.select("prefill", {"K": count, "B": 1, "W": count})
        sizes = {"K": count, "B": 1, "B_plus_1": 2, "W": count, "H": 1, "S": int(logits)}
        addresses = {
            "head_rows": memory.heads.parts["head_rows"].address,
            "features": memory.features.output.address + place * memory.features.width,
            **memory.target_cache.addresses(piece.cache_row),
        }
        self._plan.run(context, sizes, addresses)
