"""Log lines as JSON, and which request they are about."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import grpc
import pytest
from live_server import run
from operated import operated

from dcut_server import convert
from dcut_server.client import CallFailed, DcutClient
from dcut_server.ops.request_log import JsonFormatter, RequestLog
from dcut_server.serve_options import ServeOptions
from dcut_trt.backends.scripted import scripted_engine


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the root logger writes in JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    yield stream
    logging.getLogger().removeHandler(handler)


def test_an_unexpected_error_is_logged_with_the_request_it_hit(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours\nin two lines")

    async def test() -> None:
        async with operated(scripted_engine(), ServeOptions(port=0)) as running:
            running.server.host.observers.append(RequestLog())
            monkeypatch.setattr(convert, "parcel_to_proto", broken)
            async with DcutClient(running.server.address) as client:
                with pytest.raises(CallFailed) as caught:
                    await client.complete("Hush-hush", request_id="hit")
                assert caught.value.code is grpc.StatusCode.INTERNAL

    run(test)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    (line,) = [line for line in lines if line["message"].startswith("unexpected error")]
    assert (line["request_id"], line["level"]) == ("hit", "error")
    assert "a fault of ours" in line["exception"]
    assert "ush-hush" not in log.getvalue()
