"""Prometheus metrics: what they count equals what the callers were told, in every state of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from live_server import run, until
from operated import get, operated, total, value

from dcut_server.client import CallFailed, DcutClient
from dcut_server.host import ServerState
from dcut_server.serve_options import ServeOptions
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.errors import DcutError
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.types import FinishReason

METRICS = ServeOptions(port=0, metrics_port=0)


def test_metrics_equal_the_sum_of_all_usage() -> None:
    async def test() -> None:
        engine = scripted_engine(mean_length=30, max_queue=64)
        async with operated(engine, METRICS) as running, DcutClient(running.server.address) as client:

            async def leave_early() -> None:
                async for _ in client.generate("somebody who leaves", max_tokens=200, ignore_eos=True):
                    break

            calls = [client.complete(f"prompt {index}", max_tokens=5 + 7 * index) for index in range(16)]
            calls += [client.complete("one token", max_tokens=1), client.complete("to b, or", stop=["b", "e"])]
            answers = await asyncio.gather(*calls, *(leave_early() for _ in range(3)))
            await until(lambda: len(running.finals) == 21 and not engine.has_work)
            samples = await running.scrape()

        def told(field: str) -> int:
            return sum(getattr(event.usage, field) for event in running.finals)

        assert told("output_tokens") > sum(answer.usage.output_tokens for answer in answers if answer) > 100
        assert total(samples, "generation_tokens_total") == told("output_tokens")
        assert total(samples, "prompt_tokens_total") == told("prompt_tokens")
        assert total(samples, "prefix_cached_tokens_total") == told("cached_tokens")
        assert total(samples, "spec_decode_num_draft_tokens_total") == told("drafted") > 0
        assert total(samples, "spec_decode_num_verified_tokens_total") == told("verified") > 0
        assert total(samples, "spec_decode_num_accepted_tokens_total") == told("accepted") > 0
        assert total(samples, "spec_decode_num_accepted_tokens_per_pos_total") == told("accepted")
        assert told("drafted") == told("verified") + total(samples, "spec_decode_num_pruned_tokens_total")
        assert told("drafted") == 7 * total(samples, "spec_decode_num_drafts_total")
        for reason in FinishReason:
            expected = sum(event.finish is reason for event in running.finals)
            assert value(samples, "request_success_total", finished_reason=reason.value) == expected > 0

    run(test)


def test_the_prefix_cache_is_counted_as_requests_begin() -> None:
    async def test() -> None:
        engine = scripted_engine(block_size=4)
        async with operated(engine, METRICS) as running, DcutClient(running.server.address) as client:
            answers = [await client.complete("a prompt of 22 letters", max_tokens=3, ignore_eos=True) for _ in range(3)]
            samples, totals = await running.scrape(), (await client.info()).totals
        cached = sum(answer.usage.cached_tokens for answer in answers)
        assert (value(samples, "prefix_cache_queries_total"), cached) == (3 * 22, 2 * 20)
        assert value(samples, "prefix_cache_hits_total") == totals.cached_prompt_tokens == cached
        assert value(samples, "prefilled_rows_total") == totals.prompt_tokens == 3 * 22 - cached

    run(test)


def test_positions_are_counted_from_the_first_draft() -> None:
    async def test() -> None:
        engine = scripted_engine("dflash", accuracy=1.0)
        async with operated(engine, METRICS) as running, DcutClient(running.server.address) as client:
            await client.complete("all right", max_tokens=1 + 3 * 8, ignore_eos=True)  # blocks of 7 drafts and a bonus
            samples = await running.scrape()
        for position in range(7):
            assert value(samples, "spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) == 3
        assert value(samples, "spec_decode_acceptance_length") == 8

    run(test)


def test_pruning_and_the_chosen_ratio_are_told() -> None:
    async def test() -> None:
        async with operated(scripted_engine("ratio:0.5"), METRICS) as running:
            async with DcutClient(running.server.address) as client:
                await client.complete("a", max_tokens=30, ignore_eos=True)
            samples = await running.scrape()
        steps = value(samples, "decode_steps_total")
        assert value(samples, "chosen_ratio_total", ratio="0.5") == steps > 0
        assert value(samples, "kept_rows_total") == 4 * steps  # ceil(0.5 * 1 * 8)
        assert value(samples, "possible_rows_total") == 8 * steps
        assert value(samples, "bypass_steps_total") == 0
        for stage in ("draft", "select", "verify"):
            assert value(samples, "step_stage_seconds_count", stage=stage) == steps
        assert value(samples, "step_seconds_count", kind="decode") == steps
        assert value(samples, "step_seconds_count", kind="prefill") == 1

    run(test)


def test_steps_without_drafting_are_bypass_steps() -> None:
    async def test() -> None:
        async with operated(scripted_engine("plain"), METRICS) as running:
            async with DcutClient(running.server.address) as client:
                await client.complete("a", max_tokens=30, ignore_eos=True)
            samples = await running.scrape()
        assert value(samples, "bypass_steps_total") == value(samples, "decode_steps_total") == 29
        assert total(samples, "spec_decode_num_drafts_total") == total(samples, "possible_rows_total") == 0
        assert ("spec_decode_acceptance_length", ()) not in samples

    run(test)


def test_latencies_are_of_whole_answers_and_in_order() -> None:
    async def test() -> None:
        async with operated(scripted_engine("plain", delay_s=0.002), METRICS) as running:
            async with DcutClient(running.server.address) as client:
                await client.complete("whole", max_tokens=20, ignore_eos=True)
                with pytest.raises(CallFailed):
                    await client.complete("late", timeout_s=0.1, ignore_eos=True)
            await until(lambda: len(running.finals) == 2)
            samples = await running.scrape()
        for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
            assert value(samples, f"{name}_seconds_count") == 1
        assert value(samples, "request_queue_time_seconds_count") == 2
        first, whole = (
            value(samples, f"{name}_seconds_sum") for name in ("time_to_first_token", "e2e_request_latency")
        )
        assert 0.002 <= first < whole
        assert value(samples, "time_per_output_token_seconds_sum") == pytest.approx((whole - first) / 19)

    run(test)


def test_failures_are_counted_by_code() -> None:
    async def test() -> None:
        engine = scripted_engine(delay_s=0.02)
        async with operated(engine, METRICS) as running, DcutClient(running.server.address) as client:
            stream = asyncio.create_task(client.complete("a", ignore_eos=True))
            await until(lambda: engine.running == 1)
            engine.scheduler.schedule = lambda _: 1 / 0
            with pytest.raises(CallFailed):
                await stream
            await until(lambda: running.server.host.state is ServerState.FAILED and bool(running.finals))
            samples = await running.scrape()
            assert value(samples, "request_failure_total", code="UNAVAILABLE") == 1
            assert value(samples, "request_queue_time_seconds_count") == 1, "its last event has the times"
            assert total(samples, "prompt_tokens_total") == 1
            assert value(samples, "server_state", state="failed") == 1
            assert await asyncio.to_thread(get, f"{running.http}/healthz") == (503, "failed\n")

    run(test)


def test_calls_that_are_turned_away_are_counted_by_code() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=1, max_queue=2, delay_s=0.005)
        async with operated(engine, METRICS) as running, DcutClient(running.server.address) as client:
            stream = asyncio.create_task(client.complete("a", request_id="live", ignore_eos=True))
            await until(lambda: engine.running == 1)
            refused = [
                {"max_tokens": 0},  # found while the message is converted
                {"request_id": "live"},
                {"n": 4},  # of which two would have had room
                {"n": 17},
            ]
            for options in refused:
                with pytest.raises(CallFailed):
                    async for _ in client.generate("b", **options):
                        pass
            stream.cancel()
            await until(lambda: not engine.has_work)
            samples = await running.scrape()
        assert value(samples, "request_refused_total", code="INVALID_ARGUMENT") == 2
        assert value(samples, "request_refused_total", code="ALREADY_EXISTS") == 1
        assert value(samples, "request_refused_total", code="RESOURCE_EXHAUSTED") == 1
        assert value(samples, "request_refused_total", code="UNAVAILABLE") == 0
        assert total(samples, "request_failure_total") == 0

    run(test)


def test_gauges_are_read_when_asked() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=2, delay_s=0.01)
        async with operated(engine, METRICS) as running, DcutClient(running.server.address) as client:
            idle = await running.scrape()
            assert value(idle, "num_requests_running") == value(idle, "kv_cache_utilization") == 0
            assert value(idle, "cost_table_state", state="missing") == 1
            streams = [asyncio.create_task(client.complete(f"{index}", ignore_eos=True)) for index in range(3)]
            await until(lambda: engine.running == 2 and engine.waiting == 1)
            busy = await running.scrape()
            assert (value(busy, "num_requests_running"), value(busy, "num_requests_waiting")) == (2, 1)
            assert 0 < value(busy, "kv_cache_utilization") <= 1
            costs = np.array([[1.0, 1.0]])
            engine.cost_table = CostTable((1,), (0.5, 1.0), costs, np.array([1.0]), "", "", state="flat")
            flat = await running.scrape()
            states = {state: value(flat, "cost_table_state", state=state) for state in ("flat", "missing", "measured")}
            assert states == {"flat": 1, "missing": 0, "measured": 0}
            for stream in streams:
                stream.cancel()

    run(test)


def test_the_port_answers_while_the_engine_loads_and_the_warm_up_does_not_count() -> None:
    async def test() -> None:
        engine = scripted_engine()
        loaded = threading.Event()

        def opener(report: Callable[[ServerState], Any]) -> Engine:
            report(ServerState.PROFILING)
            assert loaded.wait(10)
            return engine

        async with operated(engine, METRICS, opener) as running:
            samples = await running.scrape()
            assert value(samples, "server_state", state="loading") == 1
            assert ("num_requests_running", ()) not in samples
            opening = asyncio.create_task(running.server.open(opener))
            await until(lambda: running.server.host.state is ServerState.PROFILING)
            assert value(await running.scrape(), "server_state", state="profiling") == 1
            assert await asyncio.to_thread(get, f"{running.http}/readyz") == (503, "profiling\n")
            assert await asyncio.to_thread(get, f"{running.http}/healthz") == (200, "profiling\n")
            loaded.set()
            await opening
            samples = await running.scrape()
            assert await asyncio.to_thread(get, f"{running.http}/readyz") == (200, "serving\n")
            assert (await asyncio.to_thread(get, f"{running.http}/other"))[0] == 404
        assert value(samples, "server_state", state="serving") == 1
        assert total(samples, "generation_tokens_total") == total(samples, "step_seconds_count") == 0
        assert value(samples, "num_requests_running") == 0

    run(test)


def test_two_servers_in_one_process_count_apart() -> None:
    async def test() -> None:
        async with operated(scripted_engine(), METRICS) as first, operated(scripted_engine(), METRICS) as second:
            async with DcutClient(first.server.address) as client:
                await client.complete("a", max_tokens=4, ignore_eos=True)
            assert total(await first.scrape(), "generation_tokens_total") == 4
            assert total(await second.scrape(), "generation_tokens_total") == 0

    run(test)


def test_a_taken_metrics_port_is_refused_by_name() -> None:
    async def test() -> None:
        async with operated(scripted_engine(), METRICS) as running:
            port = int(running.http.rpartition(":")[2])
            with pytest.raises(DcutError, match=f"metrics_port={port}: cannot listen on 127.0.0.1:{port}: .*in use"):
                async with operated(scripted_engine(), ServeOptions(port=0, metrics_port=port)):
                    pass

    run(test)
