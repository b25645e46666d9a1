"""Incremental detokenization: the deltas of a stream join to exactly the decoding of all its ids."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes a growing list of ids, holding back what the ids to come may still change.

    Only a short window is decoded each time: [prefix, read) is context whose text is known, so that decoders which
    look at neighbours (SentencePiece spaces, byte fallback) see the same surroundings as in one decoding of all ids.

    byte_ids: ids of byte-fallback pieces. A run of them is decoded as a whole, into U+FFFD for every byte when it is no
        UTF-8, so nothing of it is stable before another visible piece ends it.
    hidden_ids: ids that decode() drops before it looks at neighbours.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        byte_ids: Container[int] = (),
        hidden_ids: Container[int] = (),
    ) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._hidden_ids = hidden_ids
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._given = 0  # characters of the window's text that have been handed out
        self._open_run = False

    def push(self, ids: Sequence[int]) -> str:
        """Newly stable text after these ids; empty while a character is incomplete."""
        self._ids.extend(ids)
        for token_id in ids:
            if token_id not in self._hidden_ids:
                self._open_run = token_id in self._byte_ids
        if self._open_run:
            return ""
        text = self._decode(self._ids[self._prefix :])
        stable = text.rstrip(REPLACEMENT)
        if len(stable) <= self._given:
            return ""
        delta = stable[self._given :]
        self._given = len(stable)
        if stable == text:
            self._prefix, self._read = self._read, len(self._ids)
            self._given = len(self._decode(self._ids[self._prefix :]))
        return delta

    def flush(self) -> str:
        """What was held back, incomplete characters included; call once, at the end."""
        return self._decode(self._ids[self._prefix :])[self._given :]
