"""Incremental detokenization: the deltas of a stream join to exactly the decoding of all its ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes a growing list of ids, holding back text while its last character is incomplete.

    Only a short window is decoded each time: [prefix, read) is context whose text is known, so that decoders which
    look at neighbours (SentencePiece spaces, byte fallback) see the same surroundings as in one decoding of all ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._prefix_text = ""

    def push(self, ids: Sequence[int]) -> str:
        """Newly stable text after these ids; empty while a character is incomplete."""
        self._ids.extend(ids)
        text = self._decode(self._ids[self._prefix :])
        if text.endswith(REPLACEMENT) or len(text) <= len(self._prefix_text):
            return ""
        delta = text[len(self._prefix_text) :]
        self._prefix, self._read = self._read, len(self._ids)
        self._prefix_text = self._decode(self._ids[self._prefix :])
        return delta

    def flush(self) -> str:
        """What was held back, incomplete characters included; call once, at the end."""
        return self._decode(self._ids[self._prefix :])[len(self._prefix_text) :]
