"""The dashboard's HTTP side: what it refuses, what it costs, and what it never tells."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from dataclasses import replace
from urllib.parse import urlsplit

import aiohttp
import pytest
from live_server import run, serving, until
from watched import cost_table, serving_watched, streaming, watched

from dcut_server.dashboard import feed
from dcut_server.serve_options import ServeOptions
from dcut_server.sidecars import watching_sidecars
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import DcutError, UnsupportedOption


async def next_frame(response: aiohttp.ClientResponse) -> dict:
    async for line in response.content:
        if line.startswith(b"data: "):
            return json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream ended")


def test_only_own_names_and_get_are_answered_and_every_answer_is_locked_down() -> None:
    async def scenario() -> None:
        async with serving_watched(scripted_engine()) as (_, _, url), aiohttp.ClientSession() as http:
            for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
                async with http.get(url, headers={"Host": host}) as answer:
                    assert (host, answer.status) == (host, 403)
            for host in ("localhost:1", "127.0.0.1", "[::1]:8080"):
                async with http.get(url, headers={"Host": host}) as answer:
                    assert (host, answer.status) == (host, 200)
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                async with http.request(method, f"{url}api/snapshot") as answer:
                    assert answer.status == 405
            for path in (
                "",
                "dashboard.js",
                "api/snapshot",
                "api/cost-table",
                "api/events",
                "nothing-here",
                "../feed.py",
            ):
                async with http.get(url + path) as answer:
                    assert "default-src 'none'" in answer.headers["Content-Security-Policy"], path
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"
                    assert answer.status == (404 if path in ("nothing-here", "../feed.py") else 200)

    run(scenario)


def test_documents_hold_what_the_grpc_api_says() -> None:
    async def scenario() -> None:
        engine = scripted_engine()
        engine.cost_table = cost_table()
        async with serving_watched(engine) as (_, client, url), aiohttp.ClientSession(url) as http:
            async with streaming(client, 3, 20) as streams:
                await asyncio.gather(*streams)
            info, table = await client.info(), await client.cost_table()
            snapshot = await (await http.get("api/snapshot")).json()
            assert snapshot["totals"]["output_tokens"] == info.totals.output_tokens == 60
            assert snapshot["totals"]["accepted"] == info.totals.accepted
            assert snapshot["server"]["state"] == "serving"
            document = await (await http.get("api/cost-table")).json()
            assert [(row["batch"], row["cost_ms"], row["plain_ms"]) for row in document["rows"]] == [
                (row.batch, list(row.cost_ms), row.plain_ms) for row in table.rows
            ]
            engine.cost_table = replace(cost_table(), plain_ms=None)
            document = await (await http.get("api/cost-table")).json()
            assert {row["plain_ms"] for row in document["rows"]} == {None}
            engine.cost_table = None
            assert (await (await http.get("api/cost-table")).json())["state"] == "missing"

    run(scenario)


def test_engine_is_listened_to_only_while_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "LINGER_S", 0.0)

    async def scenario() -> None:
        engine = scripted_engine()
        async with serving_watched(engine) as (_, _, url), aiohttp.ClientSession(url) as http:
            others = list(engine.trace.listeners)
            await http.get("api/snapshot")
            assert engine.trace.listeners == others
            for _ in range(2):
                async with http.get("api/events") as events:
                    await next_frame(events)
                    assert len(engine.trace.listeners) == len(others) + 1
                await until(lambda: engine.trace.listeners == others)

    run(scenario)


def test_a_viewer_who_does_not_read_costs_no_memory_and_slows_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "FRAME_S", 0.0)
    monkeypatch.setattr(feed.Feed, "snapshot", lambda self: {"padding": "x" * 200_000})

    async def scenario() -> None:
        async with serving_watched(scripted_engine()) as (_, _, url), aiohttp.ClientSession(url) as http:
            with socket.socket() as stuck:
                stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
                stuck.connect(("127.0.0.1", urlsplit(url).port))
                stuck.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
                read = 0
                async with http.get("api/events") as events:
                    while read < 64 << 20:
                        read += len(await events.content.readany())
                # What the kernel's buffers hold is all there is for the other one.
                assert 0 < drained(stuck) < 16 << 20

    run(scenario)


def drained(connection: socket.socket) -> int:
    """Bytes that can be read without waiting."""
    connection.setblocking(False)
    held = 0
    with contextlib.suppress(BlockingIOError):
        while part := connection.recv(1 << 20):
            held += len(part)
    return held


def test_viewers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS", 1)

    async def scenario() -> None:
        async with serving_watched(scripted_engine()) as (_, _, url), aiohttp.ClientSession(url) as http:
            async with http.get("api/events") as events:
                await next_frame(events)
                async with http.get("api/events") as refused:
                    assert (refused.status, await refused.text()) == (
                        503,
                        "1 viewers watch already; must be at most 1\n",
                    )

            async def accepted() -> bool:
                async with http.get("api/events") as again:
                    return again.status == 200

            while not await accepted():
                await asyncio.sleep(0.01)

    run(scenario)


def test_no_frame_holds_prompt_or_output() -> None:
    async def scenario() -> None:
        engine = scripted_engine(max_len=1024, delay_s=0.005)
        async with (
            serving_watched(engine) as (_, client, url),
            aiohttp.ClientSession(url) as http,
            streaming(client, 1, 200) as (stream,),
        ):
            async with http.get("api/events") as events:
                frames = ""
                while '"tokens":200' not in frames.replace(" ", ""):
                    frames += json.dumps(await next_frame(events))
            answer = await stream
            assert "stream-0" in frames
            assert "prompt 0" not in frames
            assert answer.text[:8] not in frames
            assert ", ".join(map(str, answer.token_ids[:4])) not in frames

    run(scenario)


def test_a_taken_port_and_a_missing_package_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with serving(scripted_engine()) as (server, _):
            with socket.create_server(("127.0.0.1", 0)) as taken:
                port = taken.getsockname()[1]
                with pytest.raises(DcutError, match=f"dashboard: cannot listen on 127.0.0.1:{port}: "):
                    async with watched(server, port):
                        pass

    run(scenario)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "dcut_server.dashboard.web")
    with pytest.raises(
        UnsupportedOption, match=r"dashboard_port=0: needs aiohttp.*pip install 'dcut-trt\[dashboard\]'"
    ):
        watching_sidecars(ServeOptions(dashboard_port=0))
