"""What an operator may set on an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dcut_trt.errors import UnsupportedOption


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Raises UnsupportedOption naming option, value and limit.

    policy: a name that spec.policies knows.  max_queue: requests that may wait behind a full batch.
    prefill_chunk: prompt rows computed in one step.  busy_prefill_chunk: at most so many while streams wait for it.
    kv_memory_mib: memory for both KV caches; None takes what max_batch requests of max_len need, on CPU at most 4096.
    prefix_cache: compute the beginning that prompts share once, where requests are kept in blocks (not TensorRT).
    threads: CPU threads of the runtime; None leaves it the choice.
    cost_table: a table to use instead of the bundle's own.  profile: False never measures.
    """

    policy: str = "auto"
    max_queue: int = 256
    prefill_chunk: int = 512
    busy_prefill_chunk: int = 128
    kv_memory_mib: int | None = None
    prefix_cache: bool = True
    threads: int | None = None
    cost_table: Path | None = None
    profile: bool = True

    def __post_init__(self) -> None:
        _check("max_queue", self.max_queue, 0)
        _check("prefill_chunk", self.prefill_chunk, 1)
        _check("busy_prefill_chunk", self.busy_prefill_chunk, 1)
        _check("kv_memory_mib", self.kv_memory_mib, 1)
        _check("threads", self.threads, 1)


def _check(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UnsupportedOption(f"{name}={value}: must be at least {least}")
