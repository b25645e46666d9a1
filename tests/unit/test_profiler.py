"""The profiler on the scripted engine: what it measures, keeps, re-measures and warns of."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from policy_inputs import selected

from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.errors import CostTableError, DcutError
from dcut_trt.spec import profiler
from dcut_trt.spec.cost_model import CostModel
from dcut_trt.spec.cost_table import CostTable, load_cost_table, save_cost_table
from dcut_trt.spec.packing import budget
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.profiler import adopt_cost_table, machine_fingerprint, obtain_cost_table, profile, warm_up
from dcut_trt.spec.rules import DCut
from dcut_trt.spec.sweep import PROMPT_LENGTH
from dcut_trt.stage_types import Draft, DraftInput, Rows, Verified
from dcut_trt.types import IntArray, Request

RATIOS = (0.25, 0.5, 0.75, 1.0)
CALL_MS, ROW_MS = 5.0, 0.25
PASS_MS, PASS_ROW_MS = 2.0, 0.125


def timed_engine(
    max_batch: int, row_ms: float, *, context_ms: float = 0.0, switch_ms: float = 0.0, max_len: int = 512
) -> Engine:
    """An engine by whose clock only networks take time.

    A call of the target takes CALL_MS, row_ms for each of its rows, context_ms for each 1,000 rows of context of each
    row, and switch_ms when its rows are not as many as the last call's. A pass of the drafter takes PASS_MS and
    PASS_ROW_MS for each drafted token.
    """
    engine = scripted_engine("dflash", max_batch=max_batch, max_len=max_len)
    elapsed_ms = [0.0]
    calls: list[int] = [0]
    forward, propose = engine.target.forward, engine.drafter.propose

    def timed_forward(rows: Rows, *where: IntArray) -> Verified:
        counts = np.diff(rows.cu_lens)
        elapsed_ms[0] += CALL_MS + row_ms * counts.sum() + context_ms / 1000 * (counts * rows.past_lens).sum()
        elapsed_ms[0] += switch_ms * (counts.sum() != calls[-1])
        calls.append(counts.sum())
        return forward(rows, *where)

    def timed_propose(drafts: DraftInput) -> Draft:
        draft = propose(drafts)
        elapsed_ms[0] += PASS_MS + PASS_ROW_MS * draft.tokens.size
        return draft

    engine.target.forward, engine.drafter.propose = timed_forward, timed_propose  # type: ignore[method-assign]
    engine.trace.clock = lambda: elapsed_ms[0] / 1e3
    return engine


def steep_engine(max_batch: int = 4) -> Engine:
    return timed_engine(max_batch, ROW_MS)


def flat_engine(max_batch: int = 4) -> Engine:
    return timed_engine(max_batch, 0.0)


def as_before(engine: Engine, policy_name: str = "dflash") -> None:
    assert not engine.has_work
    assert engine.free_blocks == engine.scheduler.pool.num_blocks
    assert engine.policy.name == policy_name
    assert (engine.trace.totals.steps, len(engine.trace.records)) == (0, 0)


def test_every_entry_is_what_its_rows_cost() -> None:
    engine = steep_engine()
    table = profile(engine, RATIOS, "here")
    assert (table.batches, table.ratios, table.state) == ((1, 2, 4), RATIOS, "measured")
    batches = np.array(table.batches)
    rows = np.array([[budget(ratio, batch, 8) for ratio in RATIOS] for batch in table.batches])
    passes = PASS_MS + PASS_ROW_MS * 7 * batches
    np.testing.assert_allclose(table.cost_ms, CALL_MS + ROW_MS * rows + passes[:, None])
    np.testing.assert_allclose(table.plain_ms, CALL_MS + ROW_MS * batches)
    assert (table.switch_ms, table.context_ms) == (pytest.approx(0.0), None)  # max_len leaves no room for a long one
    as_before(engine)


def test_short_blocks_are_timed_by_the_drafters_pass_alone() -> None:
    table = profile(steep_engine(), RATIOS, "here")
    assert table.depths == (1, 2, 4, 7)
    np.testing.assert_allclose(table.draft_ms, PASS_MS + PASS_ROW_MS * np.outer(table.batches, table.depths))


@pytest.mark.parametrize(("any_budget", "depths"), [(True, (7,)), (False, None)])
def test_a_drafter_of_whole_blocks_has_one_depth_and_a_device_none(
    any_budget: bool, depths: tuple[int, ...] | None
) -> None:
    engine = steep_engine(2)
    engine.limits = replace(engine.limits, any_budget=any_budget, short_blocks=False)
    assert profile(engine, RATIOS, "here").depths == depths


def profiled_in_long_context(monkeypatch: pytest.MonkeyPatch, switch_ms: float) -> CostTable:
    monkeypatch.setattr(profiler, "LONG_CONTEXT", 400)  # the scripted model takes long over long contexts
    return profile(timed_engine(2, ROW_MS, context_ms=0.5, switch_ms=switch_ms, max_len=800), RATIOS, "here")


def test_what_a_longer_context_and_another_k_cost_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    table = profiled_in_long_context(monkeypatch, switch_ms=3.0)
    assert table.context_ms is not None
    assert table.context_ms.plain == pytest.approx(0.5, rel=0.1)
    assert table.context_ms.row == pytest.approx(0.5, rel=0.1)
    assert table.context_ms.request == pytest.approx(0.0, abs=0.1)
    assert table.switch_ms == pytest.approx(3.0, abs=0.1)
    assert table.context_rows is not None
    assert PROMPT_LENGTH < table.context_rows < 3 * PROMPT_LENGTH


def test_the_costs_that_were_measured_are_what_the_cost_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CostModel(profiled_in_long_context(monkeypatch, switch_ms=0.0), 7)
    for batch, rows, depth, context in ((2, 5, 2, 600.0), (2, 16, 7, 1500.0), (1, 1, 1, 300.0)):
        true = CALL_MS + rows * (ROW_MS + context * 0.5 / 1000) + PASS_MS + PASS_ROW_MS * depth * batch
        assert model.step_ms(batch, np.array([rows]), depth, context) == pytest.approx(true, rel=0.05)


def test_every_captured_shape_is_run() -> None:
    engine = scripted_engine("dflash", max_batch=6, max_len=512)
    calls: list[int] = engine.target.calls  # type: ignore[attr-defined]
    warm_up(engine, RATIOS)
    assert {budget(ratio, batch, 8) for batch in (1, 2, 4, 6) for ratio in RATIOS} | {1, 2, 4, 6} <= set(calls)
    as_before(engine)


def test_equal_costs_are_called_flat(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    table = obtain_cost_table(flat_engine(), RATIOS, "here", tmp_path / "cost_table.json")
    assert table is not None
    assert table.state == "flat"
    assert "flat" in caplog.text


def test_the_served_policy_comes_back_even_when_it_never_drafts() -> None:
    engine = scripted_engine("plain", max_batch=2, max_len=512)
    profile(engine, RATIOS, "here")
    as_before(engine, "plain")
    engine.submit(Request("r", (65,), 5, ignore_eos=True))
    while engine.has_work:
        assert all(event.error is None for event in engine.step())


def test_a_failing_network_leaves_the_engine_as_it_was() -> None:
    engine = scripted_engine("dflash", max_len=512)
    forward = engine.target.forward

    def fail(*_: object) -> None:
        raise DcutError("out of memory")

    engine.target.forward = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(DcutError, match="out of memory"):
        profile(engine, RATIOS, "here")
    engine.target.forward = forward  # type: ignore[method-assign]
    as_before(engine)


@pytest.mark.parametrize("max_len", [8, 20, 100, 300])
@pytest.mark.parametrize("prefill_chunk", [1, 16, 256])
@pytest.mark.parametrize("accuracy", [0.0, 1.0])
@pytest.mark.timeout(60)
def test_it_ends_whatever_lengths_and_chunks_the_engine_has(max_len: int, prefill_chunk: int, accuracy: float) -> None:
    options = {"max_batch": 8, "max_len": max_len, "prefill_chunk": prefill_chunk, "accuracy": accuracy}
    for sweep in (warm_up, lambda engine, ratios: profile(engine, ratios, "here")):
        engine = scripted_engine("dflash", **options)  # type: ignore[arg-type]
        sweep(engine, RATIOS)
        as_before(engine)


def test_batches_that_the_cache_cannot_hold_are_not_measured_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    engine = scripted_engine("dflash", max_batch=8, max_len=512, num_blocks=80)
    table = profile(engine, RATIOS, "here")
    assert table.batches == (1, 2)
    assert "larger batches are not measured" in caplog.text


def test_progress_is_told_per_batch_size() -> None:
    heard: list[tuple[int, int]] = []
    warm_up(
        scripted_engine("dflash", max_batch=4, max_len=512), RATIOS, lambda done, total: heard.append((done, total))
    )
    assert heard == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_table_is_kept_and_used_again(tmp_path: Path) -> None:
    path = tmp_path / "cost_table.json"
    measured = obtain_cost_table(steep_engine(), RATIOS, "here", path)
    engine = flat_engine()  # it would measure something else
    loaded = obtain_cost_table(engine, RATIOS, "here", path)
    assert measured is not None
    assert loaded is not None
    assert loaded.state == "loaded"
    np.testing.assert_allclose(loaded.cost_ms, measured.cost_ms, atol=1e-4)
    as_before(engine)


def saved_elsewhere(path: Path, cost_ms: float = 1000.0, ratios: tuple[float, ...] = RATIOS) -> None:
    costs = cost_ms * np.arange(1, len(ratios) + 1)[None]
    save_cost_table(CostTable((1,), ratios, costs, np.array([cost_ms]), "elsewhere", "2026"), path)


def test_a_stale_table_is_measured_again_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cost_table.json"
    saved_elsewhere(path)
    table = obtain_cost_table(steep_engine(2), RATIOS, "here", path)
    assert table is not None
    assert table.state == "measured"
    assert table.cost_ms.max() < 1000
    assert "stale" in caplog.text
    assert load_cost_table(path, "here").state == "loaded"


def test_a_stale_table_serves_where_measuring_is_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cost_table.json"
    saved_elsewhere(path)
    table = obtain_cost_table(steep_engine(1), RATIOS, "here", path, measure=False)
    assert table is not None
    assert table.state == "stale"
    assert "stale" in caplog.text


@pytest.mark.parametrize("content", ["", "{}", '{"batches": [1]}'])
def test_a_broken_table_is_named_measured_again_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path = tmp_path / "cost_table.json"
    path.write_text(content, encoding="utf-8")
    table = obtain_cost_table(steep_engine(1), RATIOS, "here", path)
    assert table is not None
    assert table.state == "measured"
    assert str(path) in caplog.text
    assert load_cost_table(path, "here").state == "loaded"


@pytest.mark.parametrize("entry", ["NaN", "null", "Infinity", "-1.0"])
def test_a_table_with_impossible_entries_is_none_where_measuring_is_off_and_auto_still_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: str
) -> None:
    path = tmp_path / "cost_table.json"
    saved_elsewhere(path)
    path.write_text(path.read_text().replace("2000.0", entry))
    engine = steep_engine(1)
    table = obtain_cost_table(engine, RATIOS, "elsewhere", path, measure=False)
    assert table is None
    assert caplog.text.count(str(path)) == 1
    assert "none, and measuring is off" in caplog.text
    caplog.clear()
    engine.policy = make_policy("auto", table, engine.limits.traits)
    assert len(caplog.records) == 1
    engine.submit(Request("r", (65,), 20, ignore_eos=True))
    while engine.has_work:
        assert all(event.error is None for event in engine.step())
    assert engine.trace.totals.verified == engine.trace.totals.drafted > 0  # every draft of a fixed depth


def test_a_table_of_other_ratios_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cost_table.json"
    saved_elsewhere(path, ratios=(0.5, 1.0))
    table = obtain_cost_table(steep_engine(1), RATIOS, "elsewhere", path)
    assert table is not None
    assert table.ratios == RATIOS
    assert "has ratios" in caplog.text


def test_a_place_that_cannot_be_written_costs_a_warning_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file" / "cost_table.json"
    path.parent.write_text("a file where a directory is needed")
    table = obtain_cost_table(steep_engine(1), RATIOS, "here", path)
    assert table is not None
    assert table.state == "measured"
    assert "cannot be saved" in caplog.text


def test_without_a_table_and_without_measuring_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = scripted_engine("dflash", max_batch=2, max_len=512)
    assert obtain_cost_table(engine, RATIOS, "here", tmp_path / "absent.json", measure=False) is None
    assert "none, and measuring is off" in caplog.text
    as_before(engine)


def test_a_measured_table_makes_dcut_verify_less_where_rows_cost_more() -> None:
    steep = DCut(profile(steep_engine(), RATIOS, "here"))
    flat = DCut(profile(flat_engine(), RATIOS, "here"))
    confidence = np.full((4, 7), 0.7, np.float32)
    assert selected(steep, confidence).keep.sum() < selected(flat, confidence).keep.sum()


def test_the_fingerprint_names_what_a_table_depends_on() -> None:
    first = machine_fingerprint("0123456789abcdef0123", "openvino 1", None)
    assert first.startswith("0123456789abcdef; openvino 1; ")
    others = [("f" * 20, "openvino 1", None), ("0123456789abcdef", "openvino 2", None), ("0123456789abcdef", "x", 2)]
    assert len({first, *(machine_fingerprint(*other) for other in others)}) == 4


@pytest.fixture(autouse=True)
def _hear_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def test_a_table_that_an_operator_names_is_used_as_it_is(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    save_cost_table(profile(steep_engine(), RATIOS, "another machine"), path)
    before = path.read_bytes()
    engine = steep_engine()
    table = adopt_cost_table(engine, path, "here", lambda done, total: None)
    assert (table.state, table.fingerprint) == ("stale", "another machine")
    assert "another machine" in caplog.text
    assert path.read_bytes() == before
    as_before(engine)


def test_a_broken_table_that_an_operator_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_text("{}")
    with pytest.raises(CostTableError, match=r"theirs\.json"):
        adopt_cost_table(steep_engine(), path, "here", lambda done, total: None)
