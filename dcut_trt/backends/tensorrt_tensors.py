"""What both plans take and give (docs/graphs.md), and whether a loaded engine is what the manifest says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcut_trt.backends.tensorrt_api import Engine
from dcut_trt.errors import BundleError
from dcut_trt.manifest import Manifest, PlanSpec

WIDTHS = {"INT32": 4, "FLOAT": 4, "HALF": 2, "BF16": 2}  # bytes, by TensorRT's name of the type
ELEMENTS = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}

# The target's inputs that the drafter's pack node has made; both plans read and write the same memory for them.
PACKED = ("token_ids", "positions", "request_rows", "depths", "subsequence_begins")


@dataclass(frozen=True, slots=True)
class Tensor:
    """kind: as in WIDTHS.  dims: a name where a dimension is dynamic.  output: it leaves the graph."""

    kind: str
    dims: tuple[int | str, ...]
    output: bool = False

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.dims)

    @property
    def is_cache(self) -> bool:
        return len(self.dims) == 4


Tensors = dict[str, Tensor]


def target_tensors(manifest: Manifest) -> Tensors:
    target, element = manifest.target, ELEMENTS[manifest.precision]
    return {
        **_integers("K", *PACKED[:4]),
        **_integers("B_plus_1", PACKED[4]),
        **_integers("B", "write_indices"),
        **_integers("W", "window_offsets"),
        **_integers("H", "head_rows"),
        **_integers("S", "logit_rows"),
        "argmax": Tensor("INT32", ("H",), output=True),
        "features": Tensor(element, ("K", manifest.feature_size), output=True),
        "logits": Tensor("FLOAT", ("S", target.vocab_size), output=True),
        **_caches(element, target.layers, target.kv_heads, manifest.cache_slots, target.head_dim),
    }


def drafter_tensors(manifest: Manifest) -> Tensors:
    """Of the drafter with the pack node at its tail; K_max is B * (D + 1)."""
    drafter, element, ratios = manifest.drafter, ELEMENTS[manifest.precision], len(manifest.ratios)
    return {
        "features": Tensor(element, ("C", manifest.feature_size)),
        **_integers("C", "context_positions"),
        **_integers("B", "anchors", "write_indices", "anchor_positions"),
        **_integers("B_plus_1", "context_begins"),
        **_integers("W", "window_offsets"),
        "budgets": Tensor("INT32", (ratios,)),
        "cost_ms": Tensor("FLOAT", (ratios,)),
        "bypass": Tensor("INT32", (1,)),
        "tokens": Tensor("INT32", ("B", manifest.draft_length), output=True),
        "confidence": Tensor("FLOAT", ("B", manifest.draft_length), output=True),
        "bucket": Tensor("INT32", (1,), output=True),
        **_integers("B", "keep", output=True),
        **_integers("K_max", *PACKED[:4], output=True),
        **_integers("B_plus_1", PACKED[4], output=True),
        **_caches(element, drafter.layers, drafter.kv_heads, manifest.cache_slots, drafter.head_dim),
    }


def _integers(dim: str, *names: str, output: bool = False) -> Tensors:
    return {name: Tensor("INT32", (dim,), output) for name in names}


def _caches(element: str, layers: int, heads: int, slots: int, head_dim: int) -> Tensors:
    shape = ("B", heads, slots, head_dim)
    return {
        f"{kind}_cache{side}.{layer}": Tensor(element, shape, output=bool(side))
        for layer in range(layers)
        for kind in ("key", "value")
        for side in ("", "_out")
    }


def check_engine(trt: Any, engine: Engine, plan: PlanSpec, tensors: Tensors) -> None:
    """Raise BundleError for the first tensor or profile of an engine that is not what the manifest says."""
    found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    for name in found ^ tensors.keys():
        has = "has" if name in found else "lacks"
        raise BundleError(f"{plan.file}: the plan {has} a tensor {name!r}, against the manifest")
    if engine.num_optimization_profiles != len(plan.profiles):
        raise BundleError(
            f"{plan.file}: the plan has {engine.num_optimization_profiles} profiles, the manifest {len(plan.profiles)}"
        )
    for name, tensor in tensors.items():
        _check_tensor(trt, engine, plan, name, tensor)


def _check_tensor(trt: Any, engine: Engine, plan: PlanSpec, name: str, tensor: Tensor) -> None:
    mode = trt.TensorIOMode.OUTPUT if tensor.output else trt.TensorIOMode.INPUT
    facts: list[tuple[str, object, object]] = [
        ("mode", mode, engine.get_tensor_mode(name)),
        ("location", trt.TensorLocation.DEVICE, engine.get_tensor_location(name)),
        ("type", getattr(trt.DataType, tensor.kind), engine.get_tensor_dtype(name)),
    ]
    shape = tuple(engine.get_tensor_shape(name))
    if tensor.output and tensor.is_cache:
        # Two addresses for one cache would be two caches.
        facts.append(("aliased input", name.replace("_cache_out.", "_cache."), engine.get_aliased_input_tensor(name)))
    if not tensor.output:
        facts.append(("shape", tensor.shape(_Dynamic()), shape))
        for index, profile in enumerate(plan.profiles if -1 in shape else ()):
            wanted = [tensor.shape(_Place(profile.dims, place)) for place in range(3)]
            ranges: Sequence[Sequence[int]] = engine.get_tensor_profile_shape(name, index)
            facts.append((f"range in profile {profile.name}", wanted, [tuple(part) for part in ranges]))
    for fact, wanted_value, got in facts:
        if wanted_value != got:
            raise BundleError(f"{plan.file}: {name}: its {fact} is {got} in the plan, {wanted_value} by the manifest")


class _Dynamic(dict[str, int]):
    def __missing__(self, dim: str) -> int:
        return -1


class _Place(dict[str, int]):
    """The minimum, optimum or maximum of every dimension."""

    def __init__(self, dims: Mapping[str, tuple[int, int, int]], place: int) -> None:
        super().__init__({dim: values[place] for dim, values in dims.items()})
