"""Prefix caching: a request begins with the blocks that others with the same first tokens have computed."""

from __future__ import annotations

from collections.abc import Sequence as Ids

from dcut_trt.kv.paged import BlockPool
from dcut_trt.kv.prefix import ROOT
from dcut_trt.sequence import Sequence

_SEEN = 16_384  # beginnings of prompts, in blocks, that are remembered


class PrefixSharing:
    """Offers the full blocks of live sequences to others, and finds what a new one may begin with.

    drafting: whether the drafter has to know a row too before others may use it.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        self.enabled = enabled
        self.drafting = True
        self._pool = pool
        self._offered: dict[str, tuple[int, int]] = {}  # request id -> leading blocks offered, node of that prefix
        self._seen: dict[int, None] = {}  # hashes of beginnings of prompts, the oldest first
        self._wanted: set[str] = set()  # requests that begin as an earlier one did, beyond what was cached

    def final_rows(self, sequence: Sequence) -> int:
        """Rows that neither network will write again."""
        return sequence.context_len if self.drafting else sequence.kv_len

    def allocate(self, sequence: Sequence, blocks: int, now: float) -> bool:
        """Give a sequence its block table, cached blocks first; False when too few are free.

        At least one token of the prompt is left to compute: its answer is the first output token.
        """
        found = self._pool.find(sequence.request.prompt_ids[:-1]) if self.enabled else []
        table = self._pool.allocate(blocks, [cached.block for cached in found])
        if table is None:
            return False
        sequence.admit(table, len(found) * self._pool.block_size, now)
        if found:
            self._offered[sequence.request.request_id] = (len(found), found[-1].node)
        if self.enabled and self._repeated_blocks(sequence.request.prompt_ids) > len(found):
            self._wanted.add(sequence.request.request_id)
        return True

    def take_wanted(self, sequence: Sequence) -> bool:
        """Whether an earlier prompt began as this one does, so that its rows are worth sharing; True only once."""
        found = sequence.request.request_id in self._wanted
        self._wanted.discard(sequence.request.request_id)
        return found

    def _repeated_blocks(self, prompt: Ids[int]) -> int:
        """Leading full blocks that an earlier prompt had too; remembers this one."""
        size, node, repeated = self._pool.block_size, 0, 0
        for index in range((len(prompt) - 1) // size):
            node = hash((node, *prompt[index * size : (index + 1) * size]))
            repeated += node in self._seen
            self._seen.pop(node, None)  # or it would keep its old place
            self._seen[node] = None
        while len(self._seen) > _SEEN:
            del self._seen[next(iter(self._seen))]
        return repeated

    def offer(self, sequence: Sequence) -> None:
        """Cache every block of a sequence that is full and final."""
        if not self.enabled:
            return
        size = self._pool.block_size
        first, node = self._offered.get(sequence.request.request_id, (0, ROOT))
        full = self.final_rows(sequence) // size
        for index in range(first, full):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            node = self._pool.cache(node, tokens, int(sequence.block_table[index]))
        if full > first:
            self._offered[sequence.request.request_id] = (full, node)

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a sequence's blocks back. keep False: what has not been offered yet is not to be used by others."""
        if keep:
            self.offer(sequence)
        self._offered.pop(sequence.request.request_id, None)
        self._wanted.discard(sequence.request.request_id)
        self._pool.release(sequence.block_table)

    def clear(self) -> None:
        """Forget all rows computed so far; live sequences keep theirs."""
        self._pool.clear_cache()
