"""dcut-trt client against a server process."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest
from live_server import encoded, solo
from server_process import address_of, process

from dcut_server import cli
from dcut_trt.types import Request


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with process("0", "1") as server:
        yield address_of(server)


def test_one_prompt(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = solo(Request("solo", encoded("user: Hi\nassistant: "), 30))
    assert cli.main(["client", "--address", address, "Hi", "--max-tokens", "30"]) == 0
    output = capsys.readouterr()
    assert output.out == text + "\n"
    assert "drafts:" in output.err
    assert "pruned" in output.err


def test_raw_from_stdin(address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert cli.main(["client", "--address", address, "--raw", "--max-tokens", "30"]) == 0
    assert capsys.readouterr().out == solo(Request("solo", encoded("Hello"), 30))[1] + "\n"


def test_a_conversation_carries_its_turns_and_survives_a_refusal(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["Hi", "x" * 5000, "More", ""])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert cli.main(["client", "--address", address, "--max-tokens", "10"]) == 0
    _, first, _ = solo(Request("solo", encoded("user: Hi\nassistant: "), 10))
    history = f"user: Hi\nassistant: {first}\nuser: More\nassistant: "
    _, second, _ = solo(Request("solo", encoded(history), 10))
    output = capsys.readouterr()
    assert output.out == f"{first}\n{second}\n"
    assert "INVALID_ARGUMENT" in output.err


@pytest.mark.parametrize(
    ("flag", "words"), [("--top-p=2", "INVALID_ARGUMENT"), ("--seed=99999999999999999999", "seed")]
)
def test_a_refusal_is_one_line(address: str, flag: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["client", "--address", address, "Hi", flag]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["client", "--address", "127.0.0.1:1", "Hi"]) == 2
    error = capsys.readouterr().err
    assert "UNAVAILABLE" in error
    assert error.count("\n") == 1
