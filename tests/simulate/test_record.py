"""Recording: what a trace says was accepted is what serving the same requests accepts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dcut_server.bench.runner import serve
from dcut_server.cli import main
from dcut_server.simulate.record import accepted_drafts, record_trace
from dcut_server.simulate.traces import TraceError, check_trace, load_trace
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import UnsupportedOption
from dcut_trt.types import Request, SamplingParams


def requests(count: int, max_tokens: int = 40, temperature: float = 0.0) -> list[Request]:
    return [
        Request(f"r{n}", (257, *range(n, n + 9)), max_tokens, SamplingParams(temperature=temperature, seed=n))
        for n in range(count)
    ]


def test_accepted_drafts_are_those_that_the_answer_goes_on_with() -> None:
    answer = np.array([5, 6, 7, 8, 9], np.int32)
    tokens = np.array([[6, 7, 8], [7, 0, 9], [0, 9, 1], [9, 1, 2]], np.int32)
    accepted, judged = accepted_drafts(tokens, answer)
    assert accepted.tolist() == [3, 1, 0, 1]
    assert judged.tolist() == [3, 2, 1, 1]  # after the third of block 0 nothing is asked, after 9 nothing is known


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_replay_accepts_what_serving_accepts(temperature: float) -> None:
    """The scripted drafter guesses by its place in a random stream, so a drafter that knows its prefix stands in."""
    asked = requests(6, temperature=temperature)
    engine = scripted_engine("dflash", max_batch=4, mean_length=60.0)
    engine.drafter = Habitual(engine.drafter)
    trace = record_trace(engine, asked, 4, "scripted", "a test")
    check_trace(trace)
    assert not engine.has_work
    assert engine.policy.name == "dflash"
    streams = serve(engine, asked, 4, "dflash").streams
    replayed = [replay(trace, request) for request in range(trace.requests)]
    assert replayed == [[count for _, count in stream.arrivals[1:]] for stream in streams]


def replay(trace, request: int) -> list[int]:
    """Tokens of every step when whole blocks are verified."""
    place, end = trace.starts[request], trace.starts[request + 1]
    emitted = []
    while place < end:
        emitted.append(min(int(trace.accepted[place]) + 1, int(end - place)))
        place += emitted[-1]
    return emitted


class Habitual:
    """Wraps a drafter so that what it proposes depends on the request's words alone."""

    def __init__(self, drafter) -> None:
        self._drafter = drafter
        self.network_ms = 0.0

    def propose(self, drafts):
        draft = self._drafter.propose(drafts)
        places = drafts.context_lens + np.array([sum(map(len, pieces)) for pieces in drafts.features])
        for row, place in enumerate(places.tolist()):
            # The scripted drafter is right, or off by one; being right becomes a matter of position and anchor.
            draft.tokens[row] = self._right(drafts, row, place)
        return draft

    def _right(self, drafts, row: int, place: int):
        generator = np.random.default_rng([place, int(drafts.anchors[row])])
        right = generator.random(self._drafter._limits.draft_length) < 0.7
        cells = self._drafter._cache.read(drafts.block_tables[row], place).tolist()
        prefix, tokens = [*cells, int(drafts.anchors[row])], []
        for good in right.tolist():
            true = self._drafter._script.next_token(prefix)
            tokens.append(true if good else (true + 1) % self._drafter._script.vocab_size)
            prefix.append(tokens[-1])
        return tokens

    def close(self) -> None:
        self._drafter.close()


def test_an_answer_of_one_token_has_no_blocks() -> None:
    engine = scripted_engine("dflash", max_batch=4)
    with pytest.raises(TraceError, match="no answer has two tokens"):
        record_trace(engine, requests(2, max_tokens=1), 2, "scripted", "a test")


def test_an_engine_that_selects_on_its_device_is_refused() -> None:
    engine = scripted_engine("dflash", max_batch=4)
    engine.limits = replace(engine.limits, any_budget=False)
    with pytest.raises(UnsupportedOption, match="any number of rows"):
        record_trace(engine, requests(2), 2, "scripted", "a test")


def test_record_and_simulate_the_real_drafter(
    smollm2_bundle_bf16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.npz"
    flags = ["--requests", "2", "--max-tokens", "6", "--concurrency", "2", "--threads", "1"]
    assert main(["record", str(smollm2_bundle_bf16), "--out", str(out), *flags]) == 0
    assert "10 blocks of 2 requests" in capsys.readouterr().out
    trace = load_trace(out)
    assert trace.requests == 2
    assert trace.last_tokens is not None
    assert (trace.margin is None) or trace.margin.shape == trace.confidence.shape
    assert (
        main(["simulate", "--trace", str(out), "--steps", "5", "--concurrency", "2", "--policies", "dflash,dcut"]) == 0
    )
    assert "dcut" in capsys.readouterr().out
