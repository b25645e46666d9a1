"""A deterministic model without weights, for tests of everything around the model.

The next token after a prefix is a pure function of the whole prefix, which the target reads back from its own paged
cache: a stale row, a wrong block table or a wrong position changes the output. The drafter sees the prefix only
through the features it was given; it guesses right with a chosen probability.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import tokenizers
from numpy.typing import NDArray

from dcut_trt.backends.base import Limits
from dcut_trt.engine import Engine
from dcut_trt.manifest import TokenizerSpec
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.policy import Policy
from dcut_trt.stage_types import Draft, DraftInput, Rows, Verified
from dcut_trt.tokenizer import Tokenizer
from dcut_trt.types import FloatArray, IntArray

_MODULUS = 2_147_483_647
_STATES = 4099  # rows of the logit table; every prefix hash maps to one of them


class Script:
    """The model: logits of the next token for any prefix. eos_id ends a text once in about `mean_length` tokens."""

    def __init__(self, vocab_size: int, eos_id: int, mean_length: float, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self.logits = generator.normal(size=(_STATES, vocab_size)).astype(np.float32)
        self.logits[:, eos_id] = np.where(generator.random(_STATES) < 1 / mean_length, 9.0, -9.0)
        self.argmax: IntArray = self.logits.argmax(axis=1).astype(np.int32)

    def state(self, prefix: Sequence[int]) -> int:
        """Row of `logits` for a prefix of token ids."""
        value = 17
        for token in prefix:
            value = (value * 48271 + int(token) + 1) % _MODULUS
        return value % _STATES

    def next_token(self, prefix: Sequence[int]) -> int:
        return int(self.argmax[self.state(prefix)])


class _PagedTokens:
    """One token per KV row, kept in blocks as a real cache is; unwritten rows hold -1."""

    def __init__(self, limits: Limits) -> None:
        self._cells = np.full((limits.num_blocks, limits.block_size), -1, np.int64)
        self._block_size = limits.block_size

    def write(self, table: IntArray, start: int, tokens: Sequence[int]) -> None:
        for offset, token in enumerate(tokens):
            row = start + offset
            self._cells[table[row // self._block_size], row % self._block_size] = token

    def read(self, table: IntArray, length: int) -> NDArray[np.int64]:
        blocks = -(-length // self._block_size)
        cells: NDArray[np.int64] = self._cells[table[:blocks]].ravel()[:length]
        return cells


class ScriptedTarget:
    """The script behind the Target protocol. delay_s: time that a call takes, for tests of waiting."""

    def __init__(self, script: Script, limits: Limits, delay_s: float = 0.0) -> None:
        self.limits = limits
        self.calls: list[int] = []  # rows of every call
        self.delay_s = delay_s
        self.network_ms = 0.0
        self._script = script
        self._cache = _PagedTokens(limits)
        self._handed_out: FloatArray = np.empty((0, limits.feature_size), np.float32)

    def forward(self, rows: Rows, head_rows: IntArray, logit_rows: IntArray) -> Verified:
        time.sleep(self.delay_s)
        self.network_ms += self.delay_s * 1e3
        self.calls.append(len(rows.token_ids))
        states = np.zeros(len(rows.token_ids), np.int64)
        for index, (past, table) in enumerate(zip(rows.past_lens.tolist(), rows.block_tables, strict=True)):
            first, last = int(rows.cu_lens[index]), int(rows.cu_lens[index + 1])
            self._cache.write(table, past, rows.token_ids[first:last].tolist())
            for row in range(first, last):
                assert rows.positions[row] == past + row - first, "a packed row stands at a wrong position"
                states[row] = self._script.state(self._cache.read(table, past + row - first + 1).tolist())
        self._handed_out.fill(-1)  # as a real runtime overwrites its output at the next call
        features = np.stack((rows.token_ids, rows.positions), axis=1).astype(np.float32)  # [K, 2]
        self._handed_out = features
        heads = states[head_rows]
        # As in a network: what makes all logits of a row NaN is NaN in its hidden states already.
        features[head_rows[np.isnan(self._script.logits[heads]).all(axis=1)]] = np.nan
        return Verified(self._script.argmax[heads], features, self._script.logits[heads[logit_rows]])

    def close(self) -> None:
        pass


class ScriptedDrafter:
    """Guesses the script's next tokens, each right with probability `accuracy`; confidence tells how likely."""

    def __init__(self, script: Script, limits: Limits, accuracy: float, seed: int) -> None:
        self._script = script
        self._limits = limits
        self._accuracy = accuracy
        self.network_ms = 0.0
        self._cache = _PagedTokens(limits)
        self._generator = np.random.default_rng(seed)

    def propose(self, drafts: DraftInput) -> Draft:
        batch, length = len(drafts.anchors), self._limits.draft_length if drafts.depth is None else drafts.depth
        tokens = np.zeros((batch, length), np.int32)
        right = self._generator.random((batch, length)) < self._accuracy
        noise = self._generator.random((batch, length))
        for row in range(batch):
            prefix = self._append(drafts, row)
            for depth in range(length):
                true = self._script.next_token(prefix)
                token = true if right[row, depth] else (true + 1) % self._script.vocab_size
                tokens[row, depth] = token
                prefix.append(token)
        confidence: FloatArray = np.where(right, 0.5 + 0.5 * noise, 0.7 * noise).astype(np.float32)
        return Draft(tokens, confidence)

    def _append(self, drafts: DraftInput, row: int) -> list[int]:
        """Write the new context rows; the whole context as token ids, and the anchor."""
        features = np.concatenate([np.asarray(piece) for piece in drafts.features[row]])  # [new, 2]
        start, table = int(drafts.context_lens[row]), drafts.block_tables[row]
        expected = np.arange(start, start + len(features))
        assert (features[:, 1] == expected).all(), "features of other positions than the context needs"
        self._cache.write(table, start, features[:, 0].astype(int).tolist())
        return [*self._cache.read(table, start + len(features)).tolist(), int(drafts.anchors[row])]

    def close(self) -> None:
        pass


def byte_tokenizer() -> Tokenizer:
    """A real byte-level tokenizer of 256 bytes, <eos> = 256 and <bos> = 257."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<eos>", "<bos>"])
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
    return Tokenizer(core, TokenizerSpec("scripted", 258, 257, (256,)), template)


def scripted_engine(  # noqa: PLR0913 - knobs of a test double
    policy: str | Policy = "ratio:0.5",
    *,
    max_batch: int = 8,
    max_len: int = 256,
    draft_length: int = 7,
    num_blocks: int | None = None,
    block_size: int = 16,
    accuracy: float = 0.6,
    mean_length: float = 100.0,
    max_queue: int = 256,
    prefill_chunk: int = 64,
    busy_prefill_chunk: int = 64,
    prefix_cache: bool = True,
    delay_s: float = 0.0,
    seed: int = 0,
    script: Script | None = None,
) -> Engine:
    """An engine over the script, with the byte tokenizer; num_blocks None gives every request its longest outcome."""
    blocks_each = -(-(max_len + draft_length) // block_size)
    limits = Limits(
        max_batch=max_batch,
        max_len=max_len,
        draft_length=draft_length,
        vocab_size=258,
        block_size=block_size,
        num_blocks=num_blocks or max_batch * blocks_each,
        feature_size=2,
        any_budget=True,
        short_blocks=True,
    )
    script = script or Script(limits.vocab_size, 256, mean_length, seed)
    chosen = make_policy(policy, None, limits.traits) if isinstance(policy, str) else policy
    return Engine(
        ScriptedTarget(script, limits, delay_s),
        ScriptedDrafter(script, limits, accuracy, seed + 1),
        byte_tokenizer(),
        chosen,
        max_queue=max_queue,
        prefill_chunk=prefill_chunk,
        busy_prefill_chunk=busy_prefill_chunk,
        prefix_cache=prefix_cache,
    )
