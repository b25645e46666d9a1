"""A loaded plan: one execution context per profile, and a CUDA graph of each once its shapes have settled."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dcut_trt.backends.tensorrt_api import Context, Engine
from dcut_trt.backends.tensorrt_device import Buffer, Device, Graph, Meter
from dcut_trt.backends.tensorrt_tensors import Tensors
from dcut_trt.errors import DcutError, StepFailed
from dcut_trt.manifest import PlanSpec, ProfileSpec

logger = logging.getLogger(__name__)

WARM_RUNS = 3  # with unchanged shapes and addresses, before their graph is captured

Sizes = Mapping[str, int]
Addresses = Mapping[str, int]


class OutsideProfile(DcutError):
    """A call has a shape that no profile of the plan takes. The message names plan, dimension, value and limits."""


class ProfileContext:
    """One profile's execution context. Its profile never changes.

    A graph holds for the shapes and addresses that it was captured with, and another shape may rewrite memory that the
    context gave it; so a context has one graph at most, and drops it when its shapes or addresses change.
    """

    def __init__(
        self, context: Context, plan: str, profile: ProfileSpec, tensors: Tensors, device: Device, *, graphs: bool
    ) -> None:
        self.profile = profile
        self.graph: Graph | None = None
        self._context = context
        self._name = f"{plan}, profile {profile.name}"
        self._inputs = {name: tensor for name, tensor in tensors.items() if not tensor.output}
        self._device = device
        self._graphs = graphs
        self._sizes: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._runs = 0  # since shapes or addresses last changed

    def run(self, sizes: Sizes, addresses: Addresses) -> None:
        """Enqueue one call.

        sizes: of every dynamic dimension.  addresses: those that differ from the last call's, of any tensors.
        Raises OutsideProfile before anything is enqueued, StepFailed when TensorRT does not enqueue it.
        """
        changed = self._shape(sizes)
        if self.bind(addresses) or changed:
            self.graph, self._runs = None, 0
        if self.graph is None and self._graphs and self._runs == WARM_RUNS:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._enqueue()
        self._runs += 1

    def bind(self, addresses: Addresses) -> bool:
        """Set tensor addresses; whether one of them is new."""
        changed = {name: address for name, address in addresses.items() if self._addresses.get(name) != address}
        for name, address in changed.items():
            self._addresses.pop(name, None)
            if not self._context.set_tensor_address(name, address):
                raise StepFailed(f"{self._name}: TensorRT refused the address {address:#x} of {name}")
            self._addresses[name] = address
        return bool(changed)

    def _shape(self, sizes: Sizes) -> bool:
        if self._sizes == sizes:
            return False
        self.check(sizes)
        self._sizes = {}  # so that nothing runs with half of the new shapes
        for name, tensor in self._inputs.items():
            shape = tensor.shape(sizes)
            if self._shapes.get(name) != shape:
                self._shapes.pop(name, None)
                if not self._context.set_input_shape(name, shape):
                    raise OutsideProfile(f"{self._name}: TensorRT refused the shape {shape} of {name}")
                self._shapes[name] = shape
        self._sizes = dict(sizes)
        return True

    def rows_for(self, count: int) -> int:
        """K of a call with so many rows that somebody wants; the rest is padding."""
        return max(count, self.profile.dims["K"][0])

    def check(self, sizes: Sizes) -> None:
        """Raise OutsideProfile unless every dimension is in its range."""
        for dim, (minimum, _, maximum) in self.profile.dims.items():
            if not minimum <= sizes[dim] <= maximum:
                raise OutsideProfile(f"{self._name}: {dim} = {sizes[dim]} is not in {minimum}..{maximum}")

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(self._device.stream):
            raise StepFailed(f"{self._name}: TensorRT did not enqueue it, shapes {self._sizes}")

    def _capture(self) -> None:
        try:
            self.graph = self._device.capture(self._enqueue)
        except Exception:
            self._graphs = False
            logger.warning(
                "%s: no CUDA graph of it can be captured; it is enqueued anew each time", self._name, exc_info=True
            )


class Plan:
    """All contexts of one engine, over the same scratch memory: one stream, so one runs at a time."""

    def __init__(self, name: str, engine: Engine, spec: PlanSpec, tensors: Tensors, device: Device) -> None:
        self.name = name
        self.tensors = tensors
        self.meter = Meter()
        self.contexts: list[ProfileContext] = []
        self._engine = engine
        self._spec = spec
        self._device = device
        self._scratch: Buffer | None = None
        self._selected: dict[tuple[object, ...], ProfileContext] = {}

    def open(self, trt: Any, scratch: Buffer, addresses: Addresses, *, graphs: bool) -> None:
        """Create the contexts. scratch: memory that every context of every plan may use.

        addresses: of all tensors; calls may give others. Prefill moves from row to row, and no graph is made of it.
        """
        self._scratch = scratch  # contexts know its address alone
        for index, profile in enumerate(self._spec.profiles):
            context = self._engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            if context is None:
                raise StepFailed(f"{self.name}, profile {profile.name}: TensorRT made no execution context")
            if not context.set_optimization_profile_async(index, self._device.stream):
                raise StepFailed(f"{self.name}, profile {profile.name}: TensorRT did not select it")
            context.set_device_memory(scratch.address, scratch.nbytes)
            settled = graphs and profile.kind != "prefill"
            opened = ProfileContext(context, self.name, profile, self.tensors, self._device, graphs=settled)
            opened.bind(addresses)
            self.contexts.append(opened)

    def select(self, kind: str, sizes: Sizes) -> ProfileContext:
        """The context of this kind that these sizes fit into with the fewest rows to spare; K is a lower bound.

        Raises OutsideProfile naming what the largest takes.
        """
        key = (kind, *sizes.items())
        if key not in self._selected:
            fitting = [context for context in self.contexts if context.profile.kind == kind and _fits(context, sizes)]
            if not fitting:
                raise OutsideProfile(self._refusal(kind, sizes))
            self._selected[key] = min(fitting, key=lambda context: _spare(context, sizes))
        return self._selected[key]

    def _refusal(self, kind: str, sizes: Sizes) -> str:
        dims = [profile.dims for profile in self._spec.profiles if profile.kind == kind]
        most = {dim: max(ranges[dim][2] for ranges in dims) for dim in sizes}
        return f"{self.name}: no {kind} profile takes {_shown(sizes)}; they end at {_shown(most)}"

    def run(self, context: ProfileContext, sizes: Sizes, addresses: Addresses | None = None) -> None:
        self.meter.time(lambda: context.run(sizes, addresses or {}))

    def close(self) -> None:
        """Contexts go before their engine."""
        self._selected.clear()
        self.contexts.clear()
        self._scratch = None
        del self._engine


def _fits(context: ProfileContext, sizes: Sizes) -> bool:
    dims = context.profile.dims
    # Of rows a larger bucket takes fewer, padded; of nothing else.
    return all((dim == "K" or dims[dim][0] <= size) and size <= dims[dim][2] for dim, size in sizes.items())


def _spare(context: ProfileContext, sizes: Sizes) -> list[tuple[int, int, int]]:
    """By dimension what will run, then what could."""
    ranges = [(size, context.profile.dims[dim]) for dim, size in sizes.items()]
    return [(max(size, minimum), maximum, -minimum) for size, (minimum, _, maximum) in ranges]


def _shown(sizes: Sizes) -> str:
    return ", ".join(f"{dim} = {size}" for dim, size in sizes.items())
