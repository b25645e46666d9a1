"""Gauges that are read from the server when Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from dcut_server.host import EngineHost, ServerState
from dcut_server.ops.metrics import PREFIX
from dcut_trt.engine import Engine

COST_TABLE_STATES = ("measured", "loaded", "stale", "flat", "missing", "invalid")
RECENT_STEPS = 1024


class ServerGauges(Collector):
    """Answers in every state of the server; what needs an engine is left out until there is one."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing to check for duplicates: the names depend on the state."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        states = (state.value for state in ServerState)
        yield _one_of("server_state", "1 for the state that the server is in", states, self._host.state.value)
        yield self._build_info()
        engine = self._host.engine
        if engine is None:
            return
        pool = engine.scheduler.pool
        yield _gauge("num_requests_running", "Requests in the running batch", engine.running)
        yield _gauge("num_requests_waiting", "Requests in the queue", engine.waiting)
        yield _gauge("kv_cache_utilization", "Share of KV blocks that requests own", 1 - pool.free / pool.num_blocks)
        state = engine.cost_table.state if engine.cost_table is not None else "missing"
        yield _one_of("cost_table_state", "1 for the state that the cost table is in", COST_TABLE_STATES, state)
        length = acceptance_length(engine)
        if length is not None:
            text = f"Tokens per request and drafting step, bonus token included, over the last {RECENT_STEPS} steps"
            yield _gauge("spec_decode_acceptance_length", text, length)

    def _build_info(self) -> GaugeMetricFamily:
        identity = self._host.identity
        labels = {
            "version": version("dcut-trt"),
            "target": identity.target,
            "drafter": identity.drafter,
            "backend": identity.backend,
            "precision": identity.precision,
            "policy": identity.policy,
        }
        family = GaugeMetricFamily(f"{PREFIX}_build_info", "What is served; always 1", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family


def acceptance_length(engine: Engine) -> float | None:
    """None before the first drafting step."""
    recent = list(engine.trace.records)[-RECENT_STEPS:]
    drafting = [record for record in recent if record.kind == "decode" and record.draft_ms > 0]
    requests = sum(record.batch for record in drafting)
    return 1 + sum(record.accepted for record in drafting) / requests if requests else None


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _one_of(name: str, text: str, states: Iterable[str], current: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["state"])
    for state in states:
        family.add_metric([state], float(state == current))
    return family
