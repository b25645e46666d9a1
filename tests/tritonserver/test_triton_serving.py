"""A real tritonserver relays to a real dcut-trt server: the same tokens, errors, cancellation, and metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from live_server import run
from server_process import address_of, process
from triton_process import Triton, ask, code_of, serving_bundle, stream, tensors, triton

from dcut_server.client import DcutClient


@pytest.mark.parametrize("streaming", [True, False])
def test_an_answer_equals_the_server_own(tritonserver: Triton, dcut_address: str, streaming: bool) -> None:
    async def test() -> None:
        async with DcutClient(dcut_address) as dcut, tritonserver.client() as client:
            for prompt, options in (
                ("greedy", {"max_tokens": 40, "ignore_eos": True}),
                ("grüße, 世界 🌍 \u0301", {"max_tokens": 40, "ignore_eos": True}),
                ("sampled", {"max_tokens": 40, "temperature": 0.5, "top_k": 20, "top_p": 0.75, "seed": 2**63 - 1}),
                ("stopped", {"max_tokens": 200, "stop_token_ids": [7, 20, 33]}),
            ):
                own = await dcut.complete(prompt, **options)
                answer = await ask(client, prompt, streaming=streaming, **options)
                assert (answer.text, tuple(answer.token_ids)) == (own.text, own.token_ids), prompt
                assert answer.last["finish_reason"].decode() == own.finish.value
                assert (len(answer.texts) > 1) == streaming or len(own.token_ids) < 5
                accepted, drafted = answer.last["total_accepted_draft_tokens"], answer.last["total_draft_tokens"]
                assert answer.last["acceptance_rate"] == pytest.approx(accepted / max(drafted, 1))
                assert 0 <= accepted <= drafted

    run(test)


def test_a_stop_string_ends_the_text_before_it(tritonserver: Triton, dcut_address: str) -> None:
    async def test() -> None:
        async with DcutClient(dcut_address) as dcut, tritonserver.client() as client:
            whole = await dcut.complete("stop string", max_tokens=60, ignore_eos=True)
            stop = next(letter for letter in whole.text[8:] if letter.isascii() and letter not in whole.text[:8])
            answer = await ask(client, "stop string", max_tokens=60, ignore_eos=True, stop=["no such text", stop])
            assert answer.text == whole.text[: whole.text.index(stop)]
            assert answer.last["finish_reason"] == b"stop"

    run(test)


def test_sixty_four_streams_at_once(tritonserver: Triton, dcut_address: str) -> None:
    async def test() -> None:
        async with DcutClient(dcut_address) as dcut, tritonserver.client() as client:
            prompts = [f"prompt {index}" for index in range(64)]
            options = {"max_tokens": 24, "ignore_eos": True}
            own = await asyncio.gather(*(dcut.complete(prompt, **options) for prompt in prompts))
            answers = await asyncio.gather(*(ask(client, prompt, **options) for prompt in prompts))
            assert [tuple(answer.token_ids) for answer in answers] == [each.token_ids for each in own]

    run(test)


REFUSED = {
    "temperature": ("a", {"temperature": -1.0}, "sampling.temperature=-1.0: must be finite and at least 0"),
    "not a number": ("a", {"temperature": float("nan")}, "sampling_param_temperature=nan: must be finite"),
    "seed": ("a", {"seed": 2**63}, f"sampling_param_seed={2**63}: must be a 64-bit integer"),
    "empty": ("", {}, "must hold at least 1 token"),
    "too long": ("a" * 5000, {}, "prompt='5000 tokens': must be at most 4095 tokens"),
    "not text": (b"\xff\xfe", {}, "text_input=b'\\xff\\xfe': must be UTF-8"),
    "two values": ("a", {"max_tokens": [1, 2]}, "sampling_param_max_tokens"),
    "many stops": ("a", {"stop": ["x"] * 17, "max_tokens": 1}, "stop"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_field(tritonserver: Triton, case: str) -> None:
    prompt, options, told = REFUSED[case]

    async def test() -> None:
        async with tritonserver.client() as client:
            answer = await ask(client, prompt, **options)
            assert answer.error is not None
            assert told in answer.error
            assert (await ask(client, "still serving", max_tokens=2, ignore_eos=True)).error is None

    run(test)


def test_an_error_has_a_code(tritonserver: Triton) -> None:
    assert asyncio.run(code_of(tritonserver, "a", temperature=-1.0)) is grpc.StatusCode.INVALID_ARGUMENT


def test_http_generate(tritonserver: Triton, dcut_address: str) -> None:
    own = asyncio.run(_own(dcut_address, "over HTTP"))
    body = {"text_input": "over HTTP", "sampling_param_max_tokens": 20, "sampling_param_ignore_eos": True}
    status, reply = tritonserver.post("generate", body)
    assert status == 200
    assert json.loads(reply)["text_output"] == own
    status, reply = tritonserver.post("generate_stream", {**body, "streaming": True})
    events = [json.loads(line.removeprefix("data: ")) for line in reply.splitlines() if line]
    assert status == 200
    assert "".join(event["text_output"] for event in events) == own
    assert ["finish_reason" in event for event in events] == [False] * (len(events) - 1) + [True]
    status, reply = tritonserver.post("generate", {**body, "sampling_param_top_p": 7.0})
    assert (status, json.loads(reply)["error"]) == (400, "sampling.top_p=7.0: must be in (0, 1]")
    status, reply = tritonserver.post("generate", {**body, "sampling_param_beams": 2})
    assert status == 400
    assert "sampling_param_beams" in json.loads(reply)["error"]


async def _own(address: str, prompt: str) -> str:
    async with DcutClient(address) as dcut:
        return (await dcut.complete(prompt, max_tokens=20, ignore_eos=True)).text


def test_metrics_count_requests_and_tokens(tritonserver: Triton) -> None:
    async def test() -> None:
        async with tritonserver.client() as client:
            before = tritonserver.counters()
            answer = await ask(client, "counted", max_tokens=30, ignore_eos=True)
            await ask(client, "")
            after = tritonserver.counters()
            assert {name: after[name] - before[name] for name in after} == {
                "success": 1,
                "error": 1,
                "cancelled": 0,
                "dcut_output_tokens_total": 30,
                "dcut_draft_tokens_total": answer.last["total_draft_tokens"],
                "dcut_accepted_draft_tokens_total": answer.last["total_accepted_draft_tokens"],
            }

    run(test)


@pytest.mark.usefixtures("triton_peer")
def test_a_dead_server_is_unavailable(tmp_path: Path) -> None:
    with process("0.005", "1") as server:
        address = address_of(server)
        with triton(address, tmp_path) as running:

            async def test() -> None:
                async with running.client() as client:
                    responses = stream(client, tensors("cut", max_tokens=4000, ignore_eos=True))
                    _, error = await anext(aiter(responses))
                    assert error is None
                    server.kill()
                    pairs = [pair async for pair in responses]
                    assert [error is not None for _, error in pairs] == [False] * (len(pairs) - 1) + [True]
                    assert f"dcut-trt server at {address}" in str(pairs[-1][1])

            run(test)
            assert asyncio.run(code_of(running, "nobody there")) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.usefixtures("triton_peer")
def test_a_real_model(smollm2_bundle_bf16: Path, tmp_path: Path) -> None:
    with serving_bundle(smollm2_bundle_bf16) as address, triton(address, tmp_path) as running:

        async def test() -> None:
            async with DcutClient(address) as dcut, running.client() as client:
                own = await dcut.complete("The capital of France is", max_tokens=24)
                answer = await ask(client, "The capital of France is", max_tokens=24)
                assert (answer.text, tuple(answer.token_ids)) == (own.text, own.token_ids)
                assert answer.last["total_draft_tokens"] > 0

        run(test)
