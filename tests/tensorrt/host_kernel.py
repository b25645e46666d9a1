"""kernel.cu built for the CPU, one thread standing in for the block."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np

from dcut_plugins.confidence_topk_pack.compile import KERNEL, SOURCE, THREADS
from dcut_plugins.confidence_topk_pack.contract import OUTPUTS, Packed, PackInputs

WARP = 32


class HostKernel:
    """Threads, warps and lanes run in ascending order until reorder()."""

    def __init__(self, folder: Path) -> None:
        shim, library = Path(__file__).with_name("host_block.h"), folder / "libhost_kernel.so"
        options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run(["g++", *options, "-x", "c++", "-include", shim, SOURCE, "-o", library], check=True)
        self._library = ctypes.CDLL(str(library))
        self.reorder(np.arange(THREADS), np.arange(THREADS // WARP), np.arange(WARP))

    def reorder(self, *orders: np.ndarray) -> None:
        """Permutations of the threads of a phase, the warps of a warp phase, and the lanes of a step."""
        self._library.set_order(*(np.ascontiguousarray(order, np.int32).ctypes for order in orders))

    def run(self, inputs: PackInputs) -> Packed:
        batch, length = inputs.tokens.shape
        count, ratios = batch * (length + 1), len(inputs.budgets)
        sizes = {"bucket": 1, "keep": batch, "subsequence_begins": batch + 1}
        outputs = [np.full(sizes.get(name, count), -99, np.int32) for name in OUTPUTS]
        pointers = [[array.ctypes for array in group] for group in (inputs.arrays().values(), outputs)]
        getattr(self._library, KERNEL)(*pointers[0], *map(ctypes.c_int, (batch, length, ratios)), *pointers[1])
        return Packed(*outputs)
