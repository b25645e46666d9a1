"""Block tables: which KV blocks belong to which request. Target and drafter share one table."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from dcut_trt.kv.prefix import CachedBlock, PrefixIndex
from dcut_trt.types import IntArray


class BlockPool:
    """Hands out KV blocks and takes them back; ids are 0 .. num_blocks - 1.

    #  free      nobody owns it, its rows mean nothing
    #  idle      nobody owns it, but its rows are cached: used again by an equal prefix, or freed, oldest first
    #  owned     in the tables of one request, or of several where it is cached; a cached block is never written
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._owners = [0] * num_blocks
        self._prefixes = PrefixIndex(block_size)

    @property
    def free(self) -> int:
        """Blocks that a request can have, idle ones among them."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks whose rows an equal prefix would find."""
        return len(self._prefixes)

    def owners(self, block: int) -> int:
        return self._owners[block]

    def is_cached(self, block: int) -> bool:
        return block in self._prefixes

    def find(self, tokens: Sequence[int]) -> list[CachedBlock]:
        """The cached blocks of the longest prefix of these tokens."""
        return list(self._prefixes.find(tokens))

    def allocate(self, count: int, shared: Sequence[int] = ()) -> IntArray | None:
        """A block table of `count` ids that begins with the `shared` ones, which find() gave just now.

        None when too few are free; nothing is taken then.
        """
        idle = sum(block in self._idle for block in shared)
        own = count - len(shared)
        if own > self.free - idle:
            return None
        for block in shared:
            self._idle.pop(block, None)
        taken = [*shared, *(self._take() for _ in range(own))]
        for block in taken:
            self._owners[block] += 1
        return np.array(taken, np.int32)

    def release(self, table: IntArray) -> None:
        """Give a block table back; what is cached stays so until its block is needed."""
        for block in table[::-1].tolist():  # the end of a prefix is freed before its beginning, which others may have
            assert self._owners[block] > 0, "a block was released twice"
            self._owners[block] -= 1
            if self._owners[block] == 0:
                if block in self._prefixes:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def cache(self, parent: int, tokens: Sequence[int], block: int) -> int:
        """Let equal prefixes find an owned block, all of whose rows are computed; the node of its prefix."""
        assert self._owners[block] > 0
        assert len(tokens) == self.block_size
        return self._prefixes.insert(parent, tokens, block)

    def clear_cache(self) -> None:
        """Nothing is found any more; idle blocks are free."""
        self._prefixes.clear()
        self._free.extend(reversed(self._idle))
        self._idle.clear()

    def check_invariants(self) -> None:
        """Every block is free, idle or owned; idle ones are cached, free ones are not."""
        owned = sum(owners > 0 for owners in self._owners)
        assert len(self._free) + len(self._idle) + owned == self.num_blocks, "a KV block leaked"
        unowned = [*self._free, *self._idle]
        assert len(set(unowned)) == len(unowned), "a KV block is free twice"
        assert not any(self._owners[block] for block in unowned), "a KV block is free and owned"
        assert all(block in self._prefixes for block in self._idle), "an idle KV block is not cached"
        assert not any(block in self._prefixes for block in self._free), "a free KV block is cached"

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        oldest, _ = self._idle.popitem(last=False)
        self._prefixes.forget(oldest)
        return oldest
