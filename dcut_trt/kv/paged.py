"""Block tables: which KV blocks belong to which request. Target and drafter share one table."""

from __future__ import annotations

import numpy as np

from dcut_trt.types import IntArray


class BlockPool:
    """Hands out KV blocks and takes them back; ids are 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, rows: int) -> int:
        """Blocks that hold this many rows."""
        return -(-rows // self.block_size)

    def allocate(self, count: int) -> IntArray | None:
        """A block table of `count` ids, or None when too few are free; nothing is taken then."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(taken[::-1], np.int32)

    def release(self, table: IntArray) -> None:
        """Give a block table back."""
        self._free.extend(int(block) for block in table[::-1])
        assert len(self._free) <= self.num_blocks, "a block was released twice"
