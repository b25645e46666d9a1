"""From an ONNX file to TensorRT's network, with everything that TensorRT says of it held to account."""

from __future__ import annotations

import functools
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dcut_engines.build_progress import Phases, Report
from dcut_engines.tensorrt_profiles import PlanError

# Warnings that a build may pass over, as (pattern, reason). Any other warning fails it: TensorRT says no more
# than a warning when it leaves out an input that decides what is computed.
ALLOWED_WARNINGS: tuple[tuple[str, str], ...] = ()
KINDS = {"INT32": "i32", "INT64": "i64", "FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16"}
SHOWN = 600  # characters of TensorRT's own words in an error


class Network:
    """A parsed network. The parser owns its weights, so it lives as long."""

    def __init__(self, trt: Any, builder: Any, graph: Path, plugins: int) -> None:
        """Parse; plugins: nodes that must become plugin layers.

        Raises PlanError when the parser refuses the graph, or warns of anything in it.
        """
        journal = journal_of(trt)
        # TensorRT 11 knows no other networks and may drop the flag.
        flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        self.trt, self.name = trt, graph.name
        self.definition = builder.create_network(0 if flag is None else 1 << int(flag))
        self.parser = trt.OnnxParser(self.definition, journal)
        journal.take()
        parsed = self.parser.parse_from_file(str(graph))
        said = journal.take()
        if not parsed:
            errors = (self.parser.get_error(index).desc() for index in range(self.parser.num_errors))
            raise PlanError(f"{graph.name}: TensorRT's parser refused it: {shown(errors)}")
        refuse_warnings(graph.name, said)
        self._check_plugins(plugins)

    def layers(self) -> Counter[str]:
        """Number of layers of each type."""
        return Counter(self.definition.get_layer(index).type.name for index in range(self.definition.num_layers))

    def inputs(self) -> dict[str, Any]:
        tensors = (self.definition.get_input(index) for index in range(self.definition.num_inputs))
        return {tensor.name: tensor for tensor in tensors}

    def kinds(self) -> list[tuple[str, str]]:
        """Name and element type of every input, in our own names for types."""
        return [(name, KINDS.get(tensor.dtype.name, tensor.dtype.name)) for name, tensor in self.inputs().items()]

    def check_native(self, layers: int) -> None:
        """Raise PlanError unless attention, cache updates and rotary embeddings of all layers are TensorRT's own.

        Decomposed, they would still be right, and many times slower.
        """
        found = self.layers()
        wanted = {"ATTENTION_INPUT": layers, "KV_CACHE_UPDATE": 2 * layers, "ROTARY_EMBEDDING": 2 * layers}
        for kind, count in wanted.items():
            if found[kind] != count:
                raise PlanError(f"{self.name}: {found[kind]} {kind} layers after parsing, {count} in the graph")

    def limit_keys(self) -> None:
        """Let attention end at each request's window; the mask alone would have it read all S_max slots."""
        trt, inputs = self.trt, self.inputs()
        if not hasattr(trt.IAttention, "key_value_lengths"):
            return
        window = self.definition.add_shape(inputs["window_offsets"]).get_output(0)
        width = self.definition.add_cast(window, trt.int32).get_output(0)
        written = self.definition.add_elementwise(inputs["write_indices"], width, trt.ElementWiseOperation.SUM)
        for index in range(self.definition.num_layers):
            layer = self.definition.get_layer(index)
            if layer.type == trt.LayerType.ATTENTION_INPUT:
                layer.__class__ = trt.IAttentionInputLayer  # TensorRT's way to reach what a layer's type adds
                layer.attention.key_value_lengths = written.get_output(0)

    def _check_plugins(self, wanted: int) -> None:
        found = self.layers()
        count = sum(found[kind] for kind in ("PLUGIN", "PLUGIN_V2", "PLUGIN_V3"))
        if count != wanted:
            raise PlanError(f"{self.name}: {count} plugin layers after parsing, {wanted} expected")


def open_builder(trt: Any) -> Any:
    """A builder that logs to journal_of(trt). Raises PlanError where an earlier logger keeps it from that."""
    journal = journal_of(trt)
    journal.take()
    builder = trt.Builder(journal)
    if any("logger" in message and "already registered" in message for message in journal.take()):
        raise PlanError(
            "TensorRT has another logger in this process, and warnings would be lost; build in one of its own"
        )
    return builder


def refuse_warnings(name: str, messages: Iterable[str]) -> None:
    """Raise PlanError for the first message that ALLOWED_WARNINGS does not list."""
    for message in messages:
        if not any(re.search(pattern, message) for pattern, _ in ALLOWED_WARNINGS):
            raise PlanError(f"{name}: TensorRT warns, and a build must not pass that over: {shown([message])}")


def shown(messages: Iterable[str]) -> str:
    """TensorRT's own words, for an error of ours."""
    text = " | ".join(" ".join(message.split()) for message in messages)
    return text[:SHOWN] or "it said nothing"


@functools.cache
def journal_of(trt: Any) -> Any:
    """The logger of this process: TensorRT keeps the first that it is given, and ignores all later ones."""

    class Journal(trt.ILogger):  # type: ignore[misc]
        """Remembers warnings and errors."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if int(severity) <= int(trt.ILogger.WARNING):
                self.messages.append(message)

        def take(self) -> list[str]:
            """What was said since the last time."""
            said, self.messages = self.messages, []
            return said

    return Journal()


def monitor_of(trt: Any, report: Report) -> Any:
    """TensorRT's progress as a fraction. Once .stopped is set, TensorRT gives up at the end of its step."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases = Phases(report)
            self.stopped = False

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.phases.step(phase_name, step)
            return not self.stopped

        def phase_finish(self, phase_name: str) -> None:
            self.phases.finish(phase_name)

    return Monitor()


@contextmanager
def stoppable(monitor: Any) -> Iterator[None]:
    """Let Ctrl-C stop TensorRT at its next step, then raise KeyboardInterrupt.

    As it is, the exception would be raised in whatever callback runs, and C++ code has no way to pass it on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: setattr(monitor, "stopped", True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if monitor.stopped:
        raise KeyboardInterrupt
