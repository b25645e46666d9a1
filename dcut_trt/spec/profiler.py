"""Measure what a whole step costs on this machine, and fill the cost table with it."""

from __future__ import annotations

import logging
import platform
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from dcut_trt.admission import blocks_needed
from dcut_trt.engine import Engine
from dcut_trt.errors import CostTableError
from dcut_trt.spec.cost_table import CostTable, load_cost_table, save_cost_table
from dcut_trt.spec.packing import captured_batches
from dcut_trt.spec.policies import FixedRatio, Plain, Policy
from dcut_trt.types import Request

logger = logging.getLogger(__name__)

PROMPT_LENGTH = 96  # a context of this length stands behind the measured steps
ROUNDS = 3  # in each, every ratio runs a few steps in a row
STEPS_PER_ROUND = 3  # the first of them is not counted: a step whose K differs from the last one's costs more

Progress = Callable[[int, int], None]


class _Bypass(Plain):
    """Plain steps that keep the drafter's context fed, so that drafting steps can follow."""

    name = "bypass"
    drafts = True


def profile(
    engine: Engine, ratios: tuple[float, ...], fingerprint: str, progress: Progress = lambda done, total: None
) -> CostTable:
    """Time whole engine steps for every captured batch size and ratio, and for plain decoding.

    Ratios take turns, so that a noisy moment hits all alike. The engine must be idle; it is idle after.
    """
    measured = _sweep(engine, ratios, ROUNDS, STEPS_PER_ROUND, progress)
    medians = np.array([[median(series) for series in row] for row in measured.values()])
    now = datetime.now(UTC).isoformat(timespec="seconds")
    table = CostTable(tuple(measured), ratios, medians[:, :-1], medians[:, -1], fingerprint, now)
    return table.with_state("flat") if table.flat else table


def warm_up(engine: Engine, ratios: tuple[float, ...], progress: Progress = lambda done, total: None) -> None:
    """Run every captured shape once, so that no request pays for the compilation of its kernels."""
    _sweep(engine, ratios, 1, 1, progress)


def obtain_cost_table(
    engine: Engine,
    ratios: tuple[float, ...],
    fingerprint: str,
    path: Path,
    *,
    measure: bool = True,
    progress: Progress = lambda done, total: None,
) -> CostTable | None:
    """The saved table when it is of this bundle and machine, else a new one, saved for the next start; warms up.

    Whatever is wrong with a saved table is logged as a warning. measure False uses a stale table rather than none.
    """
    table = _load(path, ratios, fingerprint)
    if measure and (table is None or table.state == "stale"):
        table = profile(engine, ratios, fingerprint, progress)
        _save(table, path)
    else:
        warm_up(engine, ratios, progress)
    if table is None:
        logger.warning("cost table: none, and measuring is off; dcut cannot choose")
    else:
        _warn_if_flat(table)
    return table


def adopt_cost_table(engine: Engine, path: Path, fingerprint: str, progress: Progress) -> CostTable:
    """The table that an operator names, as it is, even if it was measured elsewhere; warms up.

    Raises CostTableError when the file cannot be read or holds impossible values.
    """
    table = load_cost_table(path, fingerprint)
    _warn_if_stale(table, path, fingerprint)
    _warn_if_flat(table)
    warm_up(engine, table.ratios, progress)
    return table


def _warn_if_flat(table: CostTable) -> None:
    if table.flat:
        logger.warning("cost table: flat, all ratios cost the same within 5 %%; dcut verifies every draft")


def _warn_if_stale(table: CostTable, path: Path, fingerprint: str) -> None:
    if table.state == "stale":
        logger.warning("cost table: stale, %s was measured on [%s], this is [%s]", path, table.fingerprint, fingerprint)


def _save(table: CostTable, path: Path) -> None:
    try:
        save_cost_table(table, path)
    except OSError as error:
        logger.warning("cost table: cannot be saved to %s (%s); the next start measures again", path, error)


def machine_fingerprint(bundle_key: str, runtime: str, threads: int | None) -> str:
    """What a cost table depends on: the bundle, the runtime's version, the processor and the threads."""
    return f"{bundle_key[:16]}; {runtime}; {_processor()}; threads {threads or 'auto'}"


def _load(path: Path, ratios: tuple[float, ...], fingerprint: str) -> CostTable | None:
    if not path.exists():
        return None
    try:
        table = load_cost_table(path, fingerprint)
    except CostTableError as error:
        logger.warning("cost table: invalid, it is ignored: %s", error)
        return None
    _warn_if_stale(table, path, fingerprint)
    if table.ratios != ratios:
        logger.warning("cost table: %s has ratios %s, the bundle has %s; it is ignored", path, table.ratios, ratios)
        return None
    return table


def _sweep(
    engine: Engine, ratios: tuple[float, ...], rounds: int, steps: int, progress: Progress
) -> dict[int, list[list[float]]]:
    """Step milliseconds per captured batch size: one series per ratio, and one without drafting.

    Each round adds what follows the first of its `steps`.
    """
    policies: list[Policy] = [*(FixedRatio(ratio) for ratio in ratios), _Bypass()]
    length, output = _request_shape(engine, rounds * steps * len(policies))
    batches = _batches_that_fit(engine, length, output)
    served, engine.policy = engine.policy, policies[0]
    sharing = engine.scheduler.sharing
    cached, sharing.enabled = sharing.enabled, False  # or the prompts, which are equal, would not be computed
    measured: dict[int, list[list[float]]] = {}
    try:
        for done, batch in enumerate(batches):
            progress(done, len(batches))
            measured[batch] = [[] for _ in policies]
            for policy, series in list(zip(policies, measured[batch], strict=True)) * rounds:
                for step in range(steps):
                    engine.policy = policies[-1]  # while a batch is filled nobody may run ahead and end
                    _fill(engine, batch, length, output)
                    engine.policy = policy
                    engine.step()
                    if step > 0:
                        series.append(engine.trace.records[-1].step_ms)
            _empty(engine)
    finally:
        _empty(engine)
        engine.policy, sharing.enabled = served, cached
        engine.trace.reset()
    progress(len(batches), len(batches))
    return measured


def _fill(engine: Engine, batch: int, length: int, output: int) -> None:
    """Bring synthetic requests to decoding until `batch` of them are there."""
    while True:
        for _ in range(batch - len(engine.scheduler.live_ids())):
            ids = np.random.default_rng(engine.trace.totals.steps).integers(0, engine.limits.vocab_size, length)
            engine.submit(Request(f"profile-{secrets.token_hex(8)}", tuple(ids.tolist()), output, ignore_eos=True))
        running = engine.scheduler.running
        if len(running) == batch and all(sequence.output_length > 0 for sequence in running):
            return
        engine.step()


def _empty(engine: Engine) -> None:
    for request_id in engine.scheduler.live_ids():
        engine.cancel(request_id)
    engine.step()


def _request_shape(engine: Engine, steps: int) -> tuple[int, int]:
    """Prompt and output tokens of a synthetic request; the output outlasts the steps where max_len allows."""
    limits = engine.limits
    fill_steps = _chunks(engine, limits.max_batch, PROMPT_LENGTH)
    output = min(limits.max_len - 1, steps * (limits.draft_length + 1) + fill_steps)
    return max(1, min(PROMPT_LENGTH, limits.max_len - output)), output


def _batches_that_fit(engine: Engine, length: int, output: int) -> tuple[int, ...]:
    limits = engine.limits
    most = limits.num_blocks // blocks_needed(Request("profile", (0,) * length, output), limits)
    captured = captured_batches(limits.max_batch)
    fit = tuple(batch for batch in captured if batch <= most and _chunks(engine, batch, length) < output)
    if fit[-1] < limits.max_batch:
        logger.warning("cost table: at most %d synthetic requests fit; larger batches are not measured", fit[-1])
    return fit


def _chunks(engine: Engine, batch: int, length: int) -> int:
    """Prefill steps of a batch; between any two of them, whoever is complete already decodes once."""
    return -(-batch * length // engine.scheduler.busy_prefill_chunk)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
