"""From passes to numbers, and from numbers to table, JSON and plot."""

from __future__ import annotations

import importlib.util
import io
import json
import os
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dcut_server.bench import report
from dcut_server.bench.cli import policy_names
from dcut_server.bench.plot import check_plot, spread_apart, write_plot
from dcut_server.bench.runner import Pass, Stream
from dcut_server.bench.summary import (
    Cell,
    acceptance_by_depth,
    differing_tokens,
    policy_means,
    summarise,
    token_gaps_ms,
)
from dcut_server.cli import build_parser
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import UnsupportedOption
from dcut_trt.manifest import DrafterSpec, Manifest, TargetSpec, TokenizerSpec
from dcut_trt.metrics import StepRecord

PREFILL = StepRecord("prefill", 2, 20, 20, 0, 0, 2, None, 0.0, 0.0, 90.0, 85.0, 100.0)
PLAIN_STEP = StepRecord("decode", 2, 2, 16, 0, 0, 2, None, 0.0, 1.0, 7.0, 6.5, 10.0)
DRAFT_STEP = StepRecord("decode", 2, 8, 16, 6, 3, 5, 0.5, 4.0, 2.0, 12.0, 15.0, 20.0)
TAIL_STEP = StepRecord("decode", 1, 4, 8, 3, 1, 2, 0.5, 4.0, 2.0, 12.0, 15.0, 20.0)


def test_the_numbers_of_a_cell():
    plain, dcut = summarise(two_rounds())
    assert (plain.policy, plain.concurrency, plain.requests, plain.output_tokens) == ("plain", 2, 4, 20)
    assert plain.tokens_per_s_rounds == (10.0, 5.0)
    assert plain.tokens_per_s == pytest.approx(20 / 3)  # of totals, not the mean of rates
    assert plain.spread == pytest.approx(5 / 7.5)
    assert plain.speedup == 1.0
    assert dcut.speedup_rounds == (2.0, 2.0)
    assert dcut.speedup == pytest.approx(2.0)
    assert plain.tau == 1.0
    assert dcut.tau == pytest.approx((5 + 2) / (2 + 1))
    assert dcut.keep_ratio == pytest.approx((8 + 4) / (16 + 8))
    assert dcut.mean_batch == 1.5
    assert dcut.full_batch_tokens_per_s == pytest.approx(5 / 0.020)
    assert dcut.steps == 4
    assert dcut.ratio_steps == {"0.5": 4}
    assert plain.ratio_steps == {"none": 4}
    assert dcut.prefill_share == pytest.approx(0.2 / 1.5)


def test_of_best_and_the_means_of_a_policy():
    """Plain is twice as fast as dflash at one concurrency, and half as fast at another."""
    plain, dflash = summarise(two_rounds())
    assert (plain.of_best, dflash.of_best) == (pytest.approx(0.5), 1.0)
    cells = [
        replace(cell, policy=policy, concurrency=live, tokens_per_s=rate, of_best=rate / 8.0)
        for cell, policy, live, rate in (
            (plain, "plain", 1, 8.0),
            (dflash, "dflash", 1, 4.0),
            (plain, "plain", 2, 2.0),
            (dflash, "dflash", 2, 8.0),
        )
    ]
    first, second = policy_means(cells)
    assert (first.policy, first.cells, first.over_plain) == ("plain", 2, 1.0)
    assert first.over_dflash == pytest.approx((2 * 0.25) ** 0.5)
    assert second.over_plain == pytest.approx((0.5 * 4) ** 0.5)
    assert second.of_best == pytest.approx(0.5**0.5)
    assert policy_means(cells[1:])[0].over_plain is None  # at one concurrency plain is missing
    assert "0.707" in shown(report.means_table([first], ""))


def test_ratios_are_counted_in_hundredths():
    steps = tuple(replace(DRAFT_STEP, ratio=ratio) for ratio in (0.5, 0.501, 0.4375, None))
    passes = [Pass("auto", 2, 0, 1.0, steps, (Stream(0.0, [4], [(0.5, 1)]),))]
    assert summarise(passes)[0].ratio_steps == {"0.44": 1, "0.5": 2, "none": 1}


def test_acceptance_by_depth_is_the_share_of_blocks_accepted_so_far():
    full = replace(DRAFT_STEP, rows=16, kept=14, accepted_each=(7, 2))
    tail = replace(full, batch=1, rows=8, possible=8, accepted_each=(0,))
    ended = replace(tail, accepted_each=())
    assert acceptance_by_depth([full, tail, ended]) == pytest.approx((2 / 3, 2 / 3, *[1 / 3] * 5))
    assert sum(acceptance_by_depth([full, tail])) == pytest.approx((7 + 2 + 0) / 3)  # accepted drafts per block
    assert acceptance_by_depth([full, replace(DRAFT_STEP, accepted_each=(2, 1))]) is None  # drafts were pruned
    assert acceptance_by_depth([replace(PLAIN_STEP, accepted_each=(0, 0))]) is None
    assert acceptance_by_depth([ended]) is None
    assert acceptance_by_depth([]) is None


def test_the_split_of_a_step_adds_up():
    for cell in summarise(two_rounds()):
        times = cell.step_ms
        assert times.draft + times.select + times.verify + times.rest == pytest.approx(times.step)
    dcut = summarise(two_rounds())[1].step_ms
    assert dcut.rest == pytest.approx(2.0)
    assert dcut.host == pytest.approx(5.0)


def test_latencies_are_what_a_reader_waits_for():
    stream = Stream(1.0, [5, 6, 7, 8], [(1.5, 1), (1.6, 2), (1.9, 1)])
    assert token_gaps_ms(stream) == pytest.approx([50.0, 50.0, 300.0])
    cell = summarise(two_rounds())[0]
    assert cell.ttft_ms.p50 == pytest.approx(500.0)
    assert cell.ttft_ms.p95 == pytest.approx(500.0)


def test_differences_count_places():
    assert differing_tokens([1, 2, 3], [1, 2, 3]) == 0
    assert differing_tokens([1, 9, 3], [1, 2, 3]) == 1
    assert differing_tokens([1, 2], [1, 2, 3, 4]) == 2
    assert differing_tokens([], [1]) == 1


def test_without_plain_there_is_no_speedup_and_no_lossless_check():
    cells = summarise([served for served in two_rounds() if served.policy == "dcut"])
    assert cells[0].speedup is None
    assert cells[0].difference is None
    assert "needs the policy plain" in report.lossless_line(cells, "fp32")


def test_requests_of_one_token_make_a_cell_too():
    passes = [Pass("plain", 1, 0, 1.0, (PREFILL,), (Stream(0.0, [4], [(0.5, 1)]),))]
    cell = summarise(passes)[0]
    assert (cell.tau, cell.steps, cell.step_ms.step, cell.full_batch_tokens_per_s) == (0.0, 0, 0.0, None)
    shown(report.time_table([cell], ""))


def test_the_tables_hold_every_cell():
    cells = summarise(two_rounds())
    throughput, times = shown(report.throughput_table(cells, "title")), shown(report.time_table(cells, "title"))
    assert "2.00" in throughput
    assert "2.00-2.00" in throughput
    assert all(name in text for name in ("plain", "dcut") for text in (throughput, times))
    assert "12.0  60%" in times


def test_the_verdict_on_lossless_outputs():
    cells = summarise(two_rounds())
    assert "passed, all 20 output tokens" in report.lossless_line(cells, "fp32")
    passes = [
        replace(p, streams=(Stream(0.0, [9] * 5, [(0.5, 5)]),) * 2) if p.policy == "dcut" else p for p in two_rounds()
    ]
    differing = summarise(passes)
    assert "FAILED, 20 of 20" in report.lossless_line(differing, "fp32")
    assert "20 of 20 output tokens differ" in report.lossless_line(differing, "bf16")
    assert "20 in 4 of 4 requests" in shown(report.throughput_table(differing, ""))


def test_the_json_document_keeps_everything(tmp_path):
    cells = summarise(two_rounds())
    report.write_json(report.report_document({"command": ["dcut-trt"]}, cells), tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["schema"] == report.SCHEMA
    assert document["command"] == ["dcut-trt"]
    assert len(document["cells"]) == 2
    assert [mean["policy"] for mean in document["means"]] == ["plain", "dcut"]
    assert set(document["cells"][0]) == set(Cell.__dataclass_fields__)
    assert document["cells"][1]["step_ms"]["verify"] == 12.0
    assert document["cells"][1]["difference"] == {"tokens": 0, "compared": 20, "requests": 0}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).map(sorted), st.floats(0.01, 0.2))
def test_labels_are_moved_apart_and_stay_in_order(heights, gap):
    places = spread_apart(heights, gap)
    assert len(places) == len(heights)
    assert all(after - before >= gap - 1e-9 for before, after in pairwise(places))
    if all(after - before >= gap for before, after in pairwise(heights)):
        assert places == pytest.approx(heights)


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    one = summarise(two_rounds())
    cells = [replace(cell, concurrency=live) for live in (1, 8) for cell in one]
    write_plot([*cells, replace(cells[0], policy="ratio:0.25")], tmp_path / "a.png", "title", "subtitle")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plot_without_the_library_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOption, match=r"pip install 'dcut-trt\[bench\]'"):
        check_plot()


def test_the_command_measures_and_writes(tmp_path, monkeypatch, capsys):
    options = ["--policies", "plain,dflash", "--concurrency", "1,2", "--max-tokens", "8", "--rounds", "1"]
    outputs = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    pytest.importorskip("matplotlib")
    assert bench(monkeypatch, scripted_engine(max_len=1024), *options, *outputs) == 0
    document = json.loads((tmp_path / "a.json").read_text())
    assert [(cell["concurrency"], cell["policy"]) for cell in document["cells"]] == [
        (concurrency, policy) for concurrency in (1, 2) for policy in ("plain", "dflash")
    ]
    assert {"command", "machine", "versions", "bundle", "dataset", "options", "cost_table"} <= set(document)
    plain, dflash = document["cells"][:2]
    assert plain["acceptance"] is None
    assert len(dflash["acceptance"]) == 7
    assert 1 >= dflash["acceptance"][0] >= dflash["acceptance"][6] >= 0
    assert plain["confidence"] is None
    confidence = dflash["confidence"]
    assert confidence["drafted"] == confidence["kept"] == [confidence["drafted"][0]] * 7
    assert confidence["accepted"] == sorted(confidence["accepted"], reverse=True)
    assert sum(confidence["prefix_product"]["count"]) > 0 == sum(plain["ratio_steps"].values()) - plain["steps"]
    assert document["bundle"]["key"] == "k" * 64
    assert document["machine"]["cpus"] == os.cpu_count()
    assert document["dataset"]["prompts"] == 100
    printed = capsys.readouterr()
    assert "lossless check: passed" in printed.out
    assert "[0/8] concurrency 1, plain" in printed.err


def test_two_temperatures_are_shown_one_after_the_other(monkeypatch, capsys, tmp_path):
    options = ["--policies", "plain,dflash", "--concurrency", "1", "--max-tokens", "8", "--rounds", "1"]
    output = tmp_path / "a.json"
    assert (
        bench(monkeypatch, scripted_engine(max_len=1024), *options, "--temperature", "0,1", "--json", f"{output}") == 0
    )
    assert [cell["temperature"] for cell in json.loads(output.read_text())["cells"]] == [0.0, 0.0, 1.0, 1.0]
    printed = capsys.readouterr()
    assert (
        printed.out.index("temperature 0") < printed.out.index("temperature 1") < printed.out.index("geometric means")
    )
    assert "temperature 1, concurrency 1, plain" in printed.err


def test_policy_names_are_split_at_commas():
    assert policy_names("plain, auto:-score-depth,dcut,") == ("plain", "auto:-score-depth", "dcut")


def test_an_fp32_difference_is_an_error(monkeypatch, capsys):
    engine = scripted_engine(max_len=1024)
    exact = engine.target.forward

    def forward(rows, head_rows, logit_rows):
        verified = exact(rows, head_rows, logit_rows)
        if len(rows.token_ids) > len(rows.past_lens) and int(rows.past_lens.min()) > 0:
            verified.argmax[:] = (verified.argmax + 1) % 256
        return verified

    engine.target.forward = forward
    options = ["--policies", "plain,dflash", "--concurrency", "1", "--max-tokens", "8", "--rounds", "1", "--no-warmup"]
    assert bench(monkeypatch, engine, *options) == 1
    assert "fp32 output differs from plain decoding: dflash at 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--concurrency", "16"], "--concurrency 16: the bundle's max_batch is 8"),
        (["--rounds", "0"], "--rounds 0"),
        (["--temperature", "0,-1"], "--temperature -1.0: must be finite and at least 0"),
        (["--temperature", "0,1", "--plot", "a.png"], "--plot a.png: draws one --temperature; dcut-trt report"),
        (["--threads", "0"], "threads=0: must be at least 1"),
        (["--json", "/nowhere/a.json"], "--json /nowhere/a.json: must name a file in a directory that exists"),
        (["--dataset", "nothing"], "--dataset nothing: must be gsm8k"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(monkeypatch, options, said):
    with pytest.raises(Exception, match=said):
        bench(monkeypatch, None, *options)


def two_rounds() -> list[Pass]:
    """Ten tokens by two requests in each pass: plain in 1 and 2 seconds, dcut in half of that."""
    streams = tuple(Stream(0.0, [1, 2, 3, 4, 5], [(0.5, 1), (0.6, 2), (0.9, 2)]) for _ in range(2))
    plain, dcut = (PREFILL, PLAIN_STEP, PLAIN_STEP), (PREFILL, DRAFT_STEP, TAIL_STEP)
    return [
        Pass("plain", 2, 0, 1.0, plain, streams),
        Pass("dcut", 2, 0, 0.5, dcut, streams),
        Pass("dcut", 2, 1, 1.0, dcut, streams),
        Pass("plain", 2, 1, 2.0, plain, streams),
    ]


def shown(table) -> str:
    console = Console(width=report.NARROWEST, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def bench(monkeypatch, engine, *options: str) -> int:
    """Run the command over a scripted engine."""
    monkeypatch.setattr("dcut_server.bench.cli.read_manifest", lambda bundle: MANIFEST)
    monkeypatch.setattr("dcut_server.compose.open_engine", lambda bundle, options, progress: engine)
    args = build_parser().parse_args(["bench", "bundle", *options])
    return args.run(args)


MANIFEST = Manifest(
    schema=1,
    key="k" * 64,
    backend="scripted",
    precision="fp32",
    target=TargetSpec("a target", "", "scripted", 1, 2, 1, 1, 2, 258, 256),
    drafter=DrafterSpec("a drafter", "", 1, 1, 2, 8, 0, (0,), True, 258),
    tokenizer=TokenizerSpec("", 258, 257, (256,)),
    draft_length=7,
    ratios=(0.5, 1.0),
    captured_batches=(1, 8),
    token_buckets=(8,),
    max_batch=8,
    max_len=256,
    tensors={},
    files={},
    versions={},
)
