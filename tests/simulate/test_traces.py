"""Trace files: what goes in comes out, and a malformed one is refused where it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_traces import LENGTH, small_trace

from dcut_server.simulate.traces import RECORDED, Trace, TraceError, load_recorded, load_trace, save_trace

ARRAYS = (
    "starts",
    "prompt_lens",
    "temperatures",
    "confidence",
    "accepted",
    "judged",
    "margin",
    "tokens",
    "last_tokens",
)


def worded(trace: Trace) -> dict[str, Any]:
    """Every field of a trace file, with the optional ones."""
    generator = np.random.default_rng(3)
    positions = len(trace.confidence)
    return {
        **{name: getattr(trace, name) for name in ARRAYS},
        "margin": generator.random(trace.confidence.shape, np.float32),
        "tokens": generator.integers(0, 99, trace.confidence.shape, np.int32),
        "last_tokens": generator.integers(0, 99, (positions, 2), np.int32),
    }


@pytest.mark.parametrize("words", [False, True])
def test_what_is_saved_is_loaded(tmp_path: Path, *, words: bool) -> None:
    trace = small_trace()
    if words:
        trace = Trace(trace.name, trace.source, **worded(trace))
    save_trace(trace, tmp_path / "t.npz")
    loaded = load_trace(tmp_path / "t.npz")
    assert (loaded.name, loaded.source) == (trace.name, trace.source)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(trace, name))


@pytest.mark.parametrize("name", RECORDED)
def test_shipped_traces_are_whole(name: str) -> None:
    trace = load_recorded(name)
    assert trace.draft_length == LENGTH
    assert trace.requests >= 25
    assert trace.tokens is not None
    assert trace.last_tokens is not None
    # The anchor of each block but a text's first is what the block before had to guess first.
    inner = np.setdiff1d(np.arange(len(trace.confidence)), trace.starts[:-1])
    right = trace.accepted[inner - 1] > 0
    np.testing.assert_array_equal(right, trace.tokens[inner - 1, 0] == trace.last_tokens[inner, 1])


def _put(name: str, place: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        fields[name] = fields[name].copy()
        fields[name][place] = value

    return change


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.update({name: value})


def _cut(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.update({name: fields[name][:-1]})


def _drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.pop(name)


MALFORMED = {
    "format: must be": _set("format", np.array("other")),
    "version=2: must be 1": _set("version", np.array(2)),
    "accepted: is missing": _drop("accepted"),
    "tokens, last_tokens: one of them": _drop("last_tokens"),
    "confidence: is int32": _set("confidence", np.zeros((3, 7), np.int32)),
    "starts: is int64 of 0": _set("starts", np.array(0)),
    r"confidence\[5, 2\]: must be in": _put("confidence", (5, 2), 1.5),
    r"confidence\[0, 0\]: must be in": _put("confidence", (0, 0), np.nan),
    r"margin\[7, 0\]: must be in": _put("margin", (7, 0), -0.1),
    r"accepted\[9\]: must be 0 to": _put("accepted", 9, 8),
    r"accepted\[49\]: must be 0 to": _put("accepted", 49, 2),
    r"judged\[4\]: must be one more": _put("judged", 4, 0),
    r"starts\[0\]=1: must be 0": _put("starts", 0, 1),
    r"starts\[40\]=2001: must be 2000": _put("starts", -1, 2001),
    r"starts\[2\]: the next": _put("starts", 3, 100),
    r"prompt_lens\[3\]: must be": _put("prompt_lens", 3, 0),
    r"temperatures\[1\]: must be": _put("temperatures", 1, np.inf),
    r"tokens\[2, 6\]: must be": _put("tokens", (2, 6), -1),
    "prompt_lens: has 39 of 40": _cut("prompt_lens"),
    "judged: has 1999 of 2000": _cut("judged"),
    r"margin: is \(1999, 7\)": _cut("margin"),
}


@pytest.mark.parametrize("told", MALFORMED)
def test_malformed_traces_are_refused(tmp_path: Path, told: str) -> None:
    trace, path = small_trace(), tmp_path / "t.npz"
    facts = {
        "format": np.array("dcut-trt trace"),
        "version": np.array(1),
        "name": np.array("n"),
        "source": np.array(""),
    }
    fields = {**facts, **worded(trace)}
    np.savez(path, **fields)
    load_trace(path)
    MALFORMED[told](fields)
    np.savez(path, **fields)
    with pytest.raises(TraceError, match=rf"t\.npz: {told}"):
        load_trace(path)


def test_what_is_no_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with pytest.raises(TraceError, match="not a trace"):
        load_trace(path)
    for content in (b"", b"PK\x03\x04 nonsense", b"plain text"):
        path.write_bytes(content)
        with pytest.raises(TraceError, match="not a trace"):
            load_trace(path)
    np.save(tmp_path / "t.npy", np.zeros(3))
    with pytest.raises(TraceError, match="not a trace"):
        load_trace(tmp_path / "t.npy")


def test_a_malformed_trace_is_not_saved(tmp_path: Path) -> None:
    trace = small_trace()
    trace.accepted[0] = 9
    with pytest.raises(TraceError, match=r"accepted\[0\]"):
        save_trace(trace, tmp_path / "t.npz")
    assert not list(tmp_path.iterdir())
