"""S15-S17: a cost table never pins the choice in silence, pruning saves the target's work, and there is no cliff."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import run
from operated import Samples, operated, value
from policy_inputs import selected
from scripted_runs import letters, letters_script, run_all

from dcut_server.client import DcutClient
from dcut_server.serve_options import ServeOptions
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.errors import UnsupportedOption
from dcut_trt.spec.cost_table import CostTable, save_cost_table
from dcut_trt.spec.packing import budget, token_buckets
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.policy import NO_DRAFT, Policy
from dcut_trt.spec.profiler import obtain_cost_table
from dcut_trt.spec.rules import DCut, FixedDepth
from dcut_trt.stage_types import BatchView, Draft, DraftInput, Intent, Verified
from dcut_trt.types import FloatArray, Request

RATIOS = (0.25, 0.5, 0.75, 1.0)
BLOCK = 8
METRICS = ServeOptions(port=0, metrics_port=0)


def table(*rows: tuple[float, ...], batches: tuple[int, ...] = (1,)) -> CostTable:
    return CostTable(batches, RATIOS, np.array(rows), np.ones(len(rows)), "here", "now")


def scraped_while_serving(engine: Engine) -> Samples:
    """The metrics after one answer."""
    found: list[Samples] = []

    async def test() -> None:
        async with operated(engine, METRICS) as running, DcutClient(running.server.address) as client:
            await client.complete("a", max_tokens=30, ignore_eos=True)
            found.append(await running.scrape())

    run(test)
    return found[0]


def test_s15_a_flat_table_is_told_in_log_and_metric_and_verifies_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cost_table.json"
    save_cost_table(table((10.0, 10.2, 10.4, 10.4)), path)
    engine = scripted_engine("dflash", max_batch=2, max_len=512)
    with caplog.at_level(logging.WARNING):
        engine.cost_table = obtain_cost_table(engine, RATIOS, "here", path)
    assert "flat, all ratios cost the same" in caplog.text
    engine.policy = make_policy("dcut", engine.cost_table)
    samples = scraped_while_serving(engine)
    assert value(samples, "cost_table_state", state="flat") == 1
    assert value(samples, "chosen_ratio_total", ratio="1") == value(samples, "decode_steps_total") > 0
    assert value(samples, "kept_rows_total") == value(samples, "possible_rows_total")


@pytest.mark.parametrize("text", [None, '{"batches": [1]}', "nan"])
def test_s15_a_missing_or_invalid_table_is_told_in_log_and_metric_and_dcut_is_refused(
    text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cost_table.json"
    if text == "nan":
        save_cost_table(table((10.0, 12.0, 14.0, 16.0)), path)
        path.write_text(path.read_text().replace("12.0", "NaN"))
    elif text is not None:
        path.write_text(text)
    engine = scripted_engine("dflash", max_batch=2, max_len=512)
    with caplog.at_level(logging.WARNING):
        engine.cost_table = obtain_cost_table(engine, RATIOS, "here", path, measure=False)
    assert "none, and measuring is off" in caplog.text
    assert (str(path) in caplog.text) == (text is not None)
    with pytest.raises(UnsupportedOption, match="needs a cost table"):
        make_policy("dcut", engine.cost_table)
    assert value(scraped_while_serving(engine), "cost_table_state", state="missing") == 1


def test_a_steeper_table_verifies_less() -> None:
    confidence: FloatArray = np.full((8, 7), 0.8, np.float32)
    ratios = []
    for slope in (0.0, 2.0, 10.0, 100.0):
        cost_ms = tuple(10.0 + slope * ratio for ratio in RATIOS)
        ratios.append(selected(DCut(table(cost_ms)), confidence).ratio)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] == 1.0
    assert ratios[-1] == 0.25


def test_noise_in_a_flat_table_decides_nothing() -> None:
    noise = table((10.0, 10.2, 10.4, 10.4))
    confidence: FloatArray = np.full((8, 7), 0.1, np.float32)
    assert noise.flat
    assert selected(DCut(noise), confidence).ratio == 1.0


@pytest.mark.parametrize("ratio", RATIOS)
def test_s16_the_target_runs_the_planned_rows_and_no_others(ratio: float) -> None:
    for batch in range(1, 9):
        engine = scripted_engine(f"ratio:{ratio:g}", script=letters_script(1e9))
        run_all(engine, *(Request(f"r{index}", letters(f"{index}"), 20) for index in range(batch)))
        decodes = [record for record in engine.trace.records if record.kind == "decode"]
        calls: list[int] = engine.target.calls  # type: ignore[attr-defined]
        assert calls[-len(decodes) :] == [budget(ratio, record.batch, BLOCK) for record in decodes]
        assert [record.rows for record in decodes] == calls[-len(decodes) :]


def test_s16_a_target_that_runs_other_rows_than_planned_stops_the_engine() -> None:
    engine = scripted_engine("ratio:0.5", script=letters_script(1e9))
    forward = engine.target.forward

    def unpruned(rows: Any, head_rows: Any, logit_rows: Any) -> Verified:
        verified = forward(rows, head_rows, logit_rows)
        if rows.prompt:
            return verified
        return replace(verified, argmax=np.tile(verified.argmax, 2), features=np.tile(verified.features, (2, 1)))

    engine.target.forward = unpruned  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="other rows than planned"):
        run_all(engine, Request("r", letters("a"), 20))


def tokens_per_ms(batch: int) -> float:
    """Of dcut with a closed batch, where only networks take time and the rows of a call are padded to a bucket."""
    engine = scripted_engine(DCut(cost_table_of_that_clock()), max_batch=17, script=letters_script(1e9))
    buckets = token_buckets(RATIOS, (1, 2, 4, 8, 16, 17), BLOCK)
    spent = 0.0
    forward, propose = engine.target.forward, engine.drafter.propose

    def timed_forward(rows: Any, *others: Any) -> Any:
        nonlocal spent
        if not rows.prompt:
            spent += 5 + 0.25 * min(bucket for bucket in buckets if bucket >= len(rows.token_ids))
        return forward(rows, *others)

    def timed_propose(drafts: Any) -> Any:
        nonlocal spent
        spent += 1 + 0.1 * len(drafts.anchors)
        return propose(drafts)

    engine.target.forward, engine.drafter.propose = timed_forward, timed_propose  # type: ignore[method-assign]
    run_all(engine, *(Request(f"r{index}", letters(f"{index}"), 120) for index in range(batch)))
    return engine.trace.totals.output_tokens / spent


def cost_table_of_that_clock() -> CostTable:
    batches = (1, 2, 4, 8, 16)
    rows = np.array([[budget(ratio, batch, BLOCK) for ratio in RATIOS] for batch in batches])
    return CostTable(batches, RATIOS, 6 + 0.25 * rows + 0.1 * np.array(batches)[:, None], np.ones(5), "here", "now")


def test_s17_throughput_has_no_cliff_past_the_edge_of_a_bucket() -> None:
    throughput = [tokens_per_ms(batch) for batch in (1, 2, 3, 4, 5, 8, 9, 16, 17)]
    for smaller, larger in pairwise(throughput):
        assert larger > 0.85 * smaller, throughput


class Bypassing(FixedDepth):
    """It may draft, and never does."""

    def intend(self, view: BatchView) -> Intent:
        return NO_DRAFT


def ran(policy: str | Policy) -> tuple[list[int], list[DraftInput]]:
    """Rows of the target's calls, and what the drafter was given, of four requests."""
    engine = scripted_engine(policy, script=letters_script(1e9), prefill_chunk=64)
    passes: list[DraftInput] = []
    propose = engine.drafter.propose

    def counted(drafts: DraftInput) -> Draft:
        passes.append(drafts)
        return propose(drafts)

    engine.drafter.propose = counted  # type: ignore[method-assign]
    run_all(engine, *(Request(f"r{index}", letters(f"{index}"), 150) for index in range(4)))
    return engine.target.calls, passes  # type: ignore[attr-defined]


def test_s17_a_bypassed_step_runs_what_plain_runs() -> None:
    plain, nothing = ran("plain")
    bypassed, passes = ran(Bypassing())
    assert bypassed == plain
    assert nothing == []
    # Features are handed on a chunk of 64 rows at a time, so that they do not pile up; nothing is drafted.
    assert len(passes) == 150 // 64
    assert all(drafts.feed_only for drafts in passes)
