"""Device memory of both plans: linear KV caches, and the inputs and outputs at addresses that stay.

block      uploaded                           read by
step       before every drafter call          drafter; its anchor_positions are the target's write_indices
packed     only where the host packs          target; the drafter's pack node writes it otherwise
heads      for prompts and sampled requests   target
constants  once                               both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, prod

import numpy as np

from dcut_trt.backends.tensorrt_device import ALIGNMENT, Block, Buffer, Device, Transfers
from dcut_trt.backends.tensorrt_features import FeatureStore
from dcut_trt.backends.tensorrt_tensors import PACKED, WIDTHS, Tensor, Tensors
from dcut_trt.errors import BundleError
from dcut_trt.kv.slots import SlotMap
from dcut_trt.manifest import PlanSpec
from dcut_trt.types import IntArray

Sizes = Mapping[str, int]


class CacheMemory:
    """The KV caches of one plan: [2 * layers, rows, one request's slots], zeroed, for a masked NaN is still NaN."""

    def __init__(self, device: Device, tensors: Tensors, rows: int) -> None:
        self._device = device
        self._names = [name for name, tensor in tensors.items() if tensor.is_cache and not tensor.output]
        self.row_bytes = cache_row_bytes(tensors)
        self._pitch = rows * self.row_bytes
        self._buffer = device.allocate(len(self._names) * self._pitch)

    def addresses(self, row: int) -> dict[str, int]:
        """Of all caches from this row on; an output is its input's."""
        found = {}
        for index, name in enumerate(self._names):
            address = self._buffer.address + index * self._pitch + row * self.row_bytes
            found[name] = found[name.replace("_cache.", "_cache_out.")] = address
        return found

    def move(self, source: int, to: int) -> None:
        size = self.row_bytes
        self._device.move_columns(self._buffer, self._pitch, source * size, to * size, size)


def cache_row_bytes(tensors: Tensors) -> int:
    """Of one request in one cache. Raises BundleError where its rows would not stand at addresses TensorRT takes."""
    cache = next(tensor for tensor in tensors.values() if tensor.is_cache)
    nbytes = _nbytes(cache, {"B": 1})
    if nbytes % ALIGNMENT:
        raise BundleError(f"a cache row has {nbytes} bytes, which is no multiple of {ALIGNMENT}; rebuild the bundle")
    return nbytes


def cache_count(tensors: Tensors) -> int:
    return sum(tensor.is_cache and not tensor.output for tensor in tensors.values())


class Memory:
    """Everything but scratch that both plans have in device memory."""

    def __init__(
        self,
        transfers: Transfers,
        target: tuple[PlanSpec, Tensors],
        drafter: tuple[PlanSpec, Tensors],
        *,
        slots: int,
        prompt_rows: int,
    ) -> None:
        """target, drafter: profiles and tensors.  slots: requests at a time.  prompt_rows: of the longest prefill."""
        device = self.device = transfers.device
        self.transfers = transfers
        self.slots = SlotMap(slots)
        self.target_cache = CacheMemory(device, target[1], self.slots.rows)
        self.drafter_cache = CacheMemory(device, drafter[1], self.slots.rows)
        most, drafted = greatest(*target), greatest(*drafter)
        rows = max(most["K"], drafted["K_max"])
        batch, contexts, ratios = drafted["B"], drafted["C"], prod(drafter[1]["budgets"].shape({}))
        i32 = np.int32
        self.step = Block(
            transfers,
            {
                **dict.fromkeys(("anchors", "anchor_positions", "write_indices"), (i32, batch)),
                **{"context_begins": (i32, batch + 1), "context_positions": (i32, contexts)},
                **{"budgets": (i32, ratios), "cost_ms": (np.float32, ratios), "bypass": (i32, 1)},
                "feature_rows": (i32, contexts),  # where the features of the new context stand
            },
        )
        lengths = {**dict.fromkeys(PACKED, rows), "subsequence_begins": max(most["B"], batch) + 1}
        self.packed = Block(transfers, {name: (i32, length) for name, length in lengths.items()})
        self.heads = Block(transfers, {"head_rows": (i32, 1), "logit_rows": (i32, most["S"])})
        counting = max(most["H"], most["W"], drafted["W"])
        constants = Block(transfers, {"counting": (i32, counting)})
        constants.upload({"counting": np.arange(counting, dtype=i32)})
        self.constants = constants
        own_outputs = ("argmax", "logits"), ("tokens", "confidence", "bucket", "keep")
        self.target_io = {name: device.allocate(_nbytes(target[1][name], most)) for name in own_outputs[0]}
        self.drafter_io = {name: device.allocate(_nbytes(drafter[1][name], drafted)) for name in own_outputs[1]}
        self.drafter_features = device.allocate(_nbytes(drafter[1]["features"], drafted))
        width = _nbytes(target[1]["features"], {"K": 1})
        features = device.allocate(feature_bytes(*target, slots, prompt_rows))
        self.features = FeatureStore(transfers, features, width)

    def target_addresses(self) -> dict[str, int]:
        """Of all its tensors, as a decode or verify call has them."""
        counting = self.constants.parts["counting"].address
        return {
            **self.packed.addresses,
            "write_indices": self.step.parts["anchor_positions"].address,
            "window_offsets": counting,
            "head_rows": counting,
            "logit_rows": self.heads.parts["logit_rows"].address,
            **_addresses(self.target_io),
            "features": self.features.output.address,
            **self.target_cache.addresses(0),
        }

    def drafter_addresses(self) -> dict[str, int]:
        """Of all its tensors, as a call over the decoding requests has them."""
        uploaded = self.step.addresses
        del uploaded["feature_rows"]
        return {
            **uploaded,
            **self.packed.addresses,
            "window_offsets": self.constants.parts["counting"].address,
            **_addresses(self.drafter_io),
            "features": self.drafter_features.address,
            **self.drafter_cache.addresses(0),
        }

    def arrange(self, tables: Sequence[IntArray]) -> IntArray:
        """Bring the decoding requests to cache rows 0 .. B - 1; the row of each request [B]."""
        slots = [slot_of(table) for table in tables]
        for move in self.slots.gather(slots):
            self.target_cache.move(move.source, move.to)
            self.drafter_cache.move(move.source, move.to)
        return np.array([self.slots.row(slot) for slot in slots], np.int32)


def slot_of(table: IntArray) -> int:
    """The one KV block of a request is its slot."""
    assert len(table) == 1, "a request has more than one slot"
    return int(table[0])


def greatest(plan: PlanSpec, tensors: Tensors) -> dict[str, int]:
    """The greatest size of every dimension over a plan's profiles."""
    sizes: dict[str, int] = {}
    for profile in plan.profiles:
        for dim, (_, _, maximum) in profile.dims.items():
            sizes[dim] = max(maximum, sizes.get(dim, 0))
    if "tokens" in tensors:
        drafts = tensors["tokens"].dims[1]
        assert isinstance(drafts, int)
        sizes["K_max"] = sizes["B"] * (drafts + 1)
    return sizes


def feature_bytes(plan: PlanSpec, tensors: Tensors, slots: int, prompt_rows: int) -> int:
    """Of the target's feature output: rows of one call, or of a prefill of several prompts, each aligned."""
    width = _nbytes(tensors["features"], {"K": 1})
    rows = max(greatest(plan, tensors)["K"], prompt_rows) + slots * (row_step(width) - 1)
    return rows * width


def row_step(width: int) -> int:
    """Every so many rows of `width` bytes, one starts at an aligned address."""
    return ALIGNMENT // gcd(ALIGNMENT, width)


def memory_bytes(plan: PlanSpec, tensors: Tensors, slots: int, prompt_rows: int) -> dict[str, int]:
    """What Memory takes for one plan; what both share is counted for each."""
    sizes = greatest(plan, tensors)
    io = {name: ALIGNMENT + _nbytes(tensor, sizes) for name, tensor in tensors.items() if not tensor.is_cache}
    if tensors["features"].output:
        # Once more for features that outlive the call: they are copied out when a prompt comes in between.
        io["features"] = 2 * feature_bytes(plan, tensors, slots, prompt_rows)
    return {
        "KV caches": cache_count(tensors) * SlotMap(slots).rows * cache_row_bytes(tensors),
        "inputs and outputs": sum(io.values()),
    }


def _nbytes(tensor: Tensor, sizes: Sizes) -> int:
    return WIDTHS[tensor.kind] * prod(tensor.shape(sizes))


def _addresses(buffers: Mapping[str, Buffer]) -> dict[str, int]:
    return {name: buffer.address for name, buffer in buffers.items()}
