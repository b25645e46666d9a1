"""The ConfidenceTopKPack kernel on a GPU, through the CUDA driver alone: its answers and its time per launch.

Needs an NVIDIA driver for CUDA 13 and numpy; nvcc, or the kernel's PTX by --ptx. No torch, no TensorRT. Prints a table,
writes JSON by --json. Exit status: 0 when every case agrees with the reference, 1 when one does not, 2 without a GPU.

Tests run this script on a stand-in for the driver that executes the kernel's host build, so its flow and its calls
are proved; no GPU has run it yet, so races, the device's logf and expf, and every time it prints are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from ctypes import c_int, c_uint64
from pathlib import Path
from typing import Any

import numpy as np
from cuda_driver import Cuda, CudaError
from pack_cases import LARGEST, exact_cases, random_case

from dcut_engines.digests import cache_dir
from dcut_plugins.confidence_topk_pack.compile import KERNEL, THREADS, architecture_for, build_kernel
from dcut_plugins.confidence_topk_pack.contract import MAX_BUDGETS, MAX_POSITIONS, OUTPUTS, Packed, PackInputs
from dcut_plugins.confidence_topk_pack.reference import confidence_topk_pack, disagreement
from dcut_trt.errors import DcutError

TIMED_BATCHES = (1, 2, 4, 8, 16, 32, 64)
TIMED_LENGTH = 15
TARGET_US = 25.0  # at the largest of TIMED_BATCHES
LAUNCHES, REPLAYS, WARM_UP = 100, 20, 3  # launches in one graph; replays of it, the first few not counted


class DeviceKernel:
    """The kernel and buffers for inputs and outputs of any size it takes."""

    def __init__(self, cuda: Cuda, image: bytes) -> None:
        self._cuda = cuda
        self._function = cuda.function(image, KERNEL)
        largest = 4 * max(MAX_POSITIONS, MAX_BUDGETS)
        self._buffers = [cuda.allocate(largest) for _ in range(14)]

    def run(self, inputs: PackInputs) -> Packed:
        self.launch(self.bind(inputs))
        return self.outputs(inputs)

    def bind(self, inputs: PackInputs) -> list[c_uint64 | c_int]:
        """Copy the inputs to the device; returns the kernel's arguments."""
        for address, array in zip(self._buffers, inputs.arrays().values(), strict=False):
            self._cuda.write(address, array)
        sizes = (*inputs.tokens.shape, len(inputs.budgets))
        addresses = [c_uint64(address) for address in self._buffers]
        return [*addresses[:7], *map(c_int, sizes), *addresses[7:]]

    def launch(self, arguments: list[c_uint64 | c_int]) -> None:
        self._cuda.launch(self._function, THREADS, arguments)

    def outputs(self, inputs: PackInputs) -> Packed:
        batch, length = inputs.tokens.shape
        sizes = {"bucket": 1, "keep": batch, "subsequence_begins": batch + 1}
        arrays = [np.empty(sizes.get(name, batch * (length + 1)), np.int32) for name in OUTPUTS]
        for address, array in zip(self._buffers[7:], arrays, strict=True):
            self._cuda.read(address, array)
        return Packed(*arrays)


def check(kernel: DeviceKernel, cases: int) -> dict[str, Any]:
    """Run the exact cases, which must be equal, and random ones, which must agree."""
    failures, differing = [], 0
    for name, inputs in exact_cases():
        got, expected = kernel.run(inputs), confidence_topk_pack(inputs)
        if not all(np.array_equal(getattr(got, output), getattr(expected, output)) for output in OUTPUTS):
            failures.append(f"exact case {name}: {disagreement(inputs, got) or 'a tie was resolved differently'}")
    rng = np.random.default_rng(8)
    for number in range(cases):
        inputs = random_case(rng, LARGEST[number // 50 % len(LARGEST)] if number % 50 == 0 else None)
        got, expected = kernel.run(inputs), confidence_topk_pack(inputs)
        if reason := disagreement(inputs, got):
            failures.append(f"random case {number}: {reason}")
        differing += any(not np.array_equal(getattr(got, name), getattr(expected, name)) for name in OUTPUTS)
    return {"random_cases": cases, "near_ties_resolved_differently": differing, "failures": failures}


def time_launches(cuda: Cuda, kernel: DeviceKernel, batch: int) -> float:
    """Median microseconds of one launch among LAUNCHES in a CUDA graph."""
    arguments = kernel.bind(random_case(np.random.default_rng(batch), (batch, TIMED_LENGTH)))

    def record() -> None:
        for _ in range(LAUNCHES):
            kernel.launch(arguments)

    elapsed_ms: list[float] = cuda.graph_milliseconds(record, WARM_UP + REPLAYS)[WARM_UP:]
    return 1e3 * statistics.median(elapsed_ms) / LAUNCHES


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="random cases to compare")
    parser.add_argument("--ptx", type=Path, help="the kernel's PTX, where there is no nvcc")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--driver-library", default="libcuda.so.1")
    options = parser.parse_args()
    try:
        cuda = Cuda(options.driver_library)
        major, minor = cuda.compute_capability
        architecture = architecture_for((major, minor))
        image = options.ptx.read_bytes() if options.ptx else build_kernel("ptx", architecture, cache_dir())
        kernel = DeviceKernel(cuda, image)
    except (CudaError, DcutError, OSError) as error:
        print(f"kernel check: not run: {error}", file=sys.stderr)
        return 2
    print(f"{cuda.device_name}, compute capability {major}.{minor}, CUDA {cuda.cuda_version / 1000:g}")
    result = check(kernel, options.cases)
    print(f"answers: {len(result['failures'])} wrong; {result['near_ties_resolved_differently']} near-ties", end=" ")
    print(f"resolved differently in {options.cases} random cases")
    for failure in result["failures"][:10]:
        print(f"  {failure}")
    launch_us = {batch: time_launches(cuda, kernel, batch) for batch in TIMED_BATCHES}
    print(f"{'B':>4} {'B(D+1)':>7} {'us/launch':>10}")
    for batch, microseconds in launch_us.items():
        print(f"{batch:>4} {batch * (TIMED_LENGTH + 1):>7} {microseconds:>10.2f}")
    met = launch_us[TIMED_BATCHES[-1]] < TARGET_US
    print(f"target: under {TARGET_US:g} us at B={TIMED_BATCHES[-1]}: {'met' if met else 'missed'}")
    if options.json:
        device = {"device": cuda.device_name, "compute_capability": f"{major}.{minor}", "cuda": cuda.cuda_version}
        report = {**device, **result, "launch_us": launch_us, "target_us": TARGET_US, "target_met": met}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
