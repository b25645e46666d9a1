"""Which KV block holds which tokens behind which prefix, so that equal prefixes can share their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

ROOT = 0  # the node of the empty prefix

Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block of tokens behind a prefix. node: names that prefix with this block, and is never used again."""

    node: int
    block: int


class PrefixIndex:
    """A tree of full blocks: (node of the prefix, the block's tokens) -> the KV block that holds their rows.

    The tokens themselves are the key, so two prefixes cannot be taken for each other. A block whose parent has been
    forgotten cannot be found any more, and waits to be forgotten too.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[Key, CachedBlock] = {}
        self._key_of: dict[int, Key] = {}
        self._nodes = count(ROOT + 1)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def __len__(self) -> int:
        return len(self._key_of)

    def find(self, tokens: Sequence[int]) -> Iterator[CachedBlock]:
        """The longest chain of blocks that hold the first tokens."""
        node = ROOT
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            found = self._entries.get((node, tuple(tokens[start : start + self._block_size])))
            if found is None:
                return
            yield found
            node = found.node

    def insert(self, parent: int, tokens: Sequence[int], block: int) -> int:
        """The node of these tokens behind `parent`; `block` holds them from now on unless another one does already."""
        key = (parent, tuple(tokens))
        found = self._entries.get(key)
        if found is None:
            found = self._entries[key] = CachedBlock(next(self._nodes), block)
            self._key_of[block] = key
        return found.node

    def forget(self, block: int) -> None:
        del self._entries[self._key_of.pop(block)]

    def clear(self) -> None:
        self._entries.clear()
        self._key_of.clear()
