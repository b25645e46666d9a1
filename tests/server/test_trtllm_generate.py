"""trtllm.TrtllmService.Generate: the same tokens as dcut.v1, in TensorRT-LLM's messages."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from live_server import encoded, nothing_left, run, serving, solo, until
from trtllm_calls import answer, answers, message, stub_of

from dcut_server.compose import load_networks
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.manifest import read_manifest
from dcut_trt.spec.policies import make_policy
from dcut_trt.tokenizer import Tokenizer
from dcut_trt.types import FinishReason, Request, SamplingParams

PROMPTS = ["plain", "naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 🇩🇪", "\x00 nul"]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 11, "min_p": 0.01}
PENALISED = {**SAMPLED, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.3}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLED, PENALISED])
def test_the_tokens_are_those_of_dcut_v1(sampling: dict[str, Any]) -> None:
    async def test() -> None:
        engine = scripted_engine()
        async with serving(engine) as (server, client), stub_of(server.address) as stub:
            for prompt in PROMPTS:
                expected = await client.complete(prompt, max_tokens=60, ignore_eos=True, **sampling)
                for streaming in (True, False):
                    request = message(
                        encoded(prompt), sampling=sampling, max_tokens=60, ignore_eos=True, streaming=streaming
                    )
                    got = await answer(stub, request)
                    assert got.ids == expected.token_ids
                    assert bool(got.chunks) == streaming
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_one_chunk_per_engine_step_and_the_counts_of_the_last_are_the_totals() -> None:
    async def test() -> None:
        engine = scripted_engine(delay_s=0.003)
        async with serving(engine) as (server, client), stub_of(server.address) as stub:
            begun, before = time.time(), (await client.info()).totals
            request = message(
                encoded("Hello"), ignore_eos=True, request_id="mine", output={"return_perf_metrics": True}
            )
            replies = [reply async for reply in stub.Generate(request)]
            await until(lambda: nothing_left(server, engine))
            totals = (await client.info()).totals
        assert {reply.request_id for reply in replies} == {"mine"}
        *chunks, complete = [getattr(reply, reply.WhichOneof("response")) for reply in replies]
        assert 0 <= totals.steps - before.steps - len(chunks) <= 1, "the prefill may show no token"
        counts = [(chunk.prompt_tokens, chunk.completion_tokens) for chunk in chunks]
        assert counts == sorted(set(counts)), "every chunk adds tokens"
        assert (complete.prompt_tokens, complete.completion_tokens) == counts[-1] == (5, 40)
        assert complete.finish_reason == "length"
        assert complete.WhichOneof("matched_stop") is None
        assert complete.spec_accepted_tokens == totals.accepted - before.accepted > 0
        assert complete.spec_draft_tokens == totals.verified - before.verified
        times = complete.perf_metrics
        order = [begun, times.arrival_time, times.first_scheduled_time, times.first_token_time, times.last_token_time]
        assert order == sorted(order)
        assert order[-1] < begun + 30

    run(test)


def test_the_end_of_sequence_id_is_left_out_unless_asked_for() -> None:
    ids, _, finish = solo(Request("solo", encoded("a"), 200))
    assert (finish, ids[-1]) == (FinishReason.STOP, 256)

    async def test() -> None:
        async with serving(scripted_engine()) as (server, _), stub_of(server.address) as stub:
            for keep in (False, True):
                request = message(
                    encoded("a"), max_tokens=200, include_stop_token_in_output=keep, output={"logprobs": 0}
                )
                got = await answer(stub, request)
                (complete,) = got.completes
                assert got.ids == (ids if keep else ids[:-1])
                assert [entry.token_id for entry in complete.logprobs] == list(got.ids)
                assert (complete.finish_reason, complete.matched_token_id) == ("stop", 256)
                assert complete.completion_tokens == len(ids)
                assert "perf_metrics" not in {field.name for field, _ in complete.ListFields()}

    run(test)


def test_stop_ids_stop_strings_and_min_tokens() -> None:
    ids, text, _ = solo(Request("solo", encoded("b"), 60, ignore_eos=True))
    stop_id = ids[9]
    first = ids.index(stop_id)
    stop_text = next(letter for letter in text if letter.isprintable() and letter.isascii())

    async def test() -> None:
        async with serving(scripted_engine()) as (server, client), stub_of(server.address) as stub:
            got = await answer(stub, message(encoded("b"), stop_token_ids=[stop_id], ignore_eos=True))
            assert got.ids == ids[:first]
            assert (got.completes[0].finish_reason, got.completes[0].matched_token_id) == ("stop", stop_id)

            expected = await client.complete("b", max_tokens=60, ignore_eos=True, stop=[stop_text])
            got = await answer(stub, message(encoded("b"), max_tokens=60, ignore_eos=True, stop=[stop_text]))
            assert got.ids == expected.token_ids
            assert (got.completes[0].finish_reason, got.completes[0].matched_stop_str) == ("stop", stop_text)

            late = message(encoded("b"), stop_token_ids=[stop_id], ignore_eos=True, sampling={"min_tokens": first + 2})
            assert (await answer(stub, late)).completes[0].completion_tokens >= first + 2

    run(test)


def test_every_sequence_is_the_single_request_with_its_seed() -> None:
    async def test() -> None:
        engine = scripted_engine()
        async with serving(engine) as (server, _), stub_of(server.address) as stub:
            sampling = {"temperature": 1.0, "seed": 40, "num_return_sequences": 3}
            got = await answers(stub, message(encoded("abc"), sampling=sampling, ignore_eos=True))
            assert len({each.ids for each in got}) == 3
            for index, each in enumerate(got):
                alone = solo(Request("r", encoded("abc"), 40, SamplingParams(1.0, seed=40 + index), ignore_eos=True))
                assert each.ids == alone[0]
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_logprobs_are_those_of_dcut_v1_in_32_bits() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (server, client), stub_of(server.address) as stub:
            expected = (await client.complete("lp", max_tokens=40, ignore_eos=True, logprobs=3)).logprobs
            got = await answer(stub, message(encoded("lp"), ignore_eos=True, output={"logprobs": 3}))
            assert got.ids
            entries = got.completes[0].logprobs
            assert [entry.token_id for entry in entries] == [entry.token_id for entry in expected]
            for entry, wanted in zip(entries, expected, strict=True):
                assert entry.logprob == pytest.approx(wanted.logprob, rel=1e-6)
                assert [top.token_id for top in entry.top_logprobs] == [token_id for token_id, _ in wanted.top]
                assert len(entry.top_logprobs) == 3
            assert not (await answer(stub, message(encoded("lp")))).completes[0].logprobs

    run(test)


def test_temperature_follows_tensorrt_llm_when_it_is_unset() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (server, client), stub_of(server.address) as stub:
            for fields, temperature in (({}, 0.0), ({"top_k": 5}, 1.0), ({"top_p": 0.5}, 1.0)):
                request = message(encoded("t"), ignore_eos=True, sampling={"seed": 3, **fields})
                request.sampling_config.ClearField("temperature")
                wanted = await client.complete(
                    "t", max_tokens=40, ignore_eos=True, temperature=temperature, seed=3, **fields
                )
                assert (await answer(stub, request)).ids == wanted.token_ids

    run(test)


def test_64_streams_at_once_and_prompts_up_to_the_limit() -> None:
    async def test() -> None:
        engine = scripted_engine(max_len=96)
        async with serving(engine) as (server, _), stub_of(server.address) as stub:
            prompts = [encoded(f"prompt {index}") for index in range(62)] + [(65,) * 94, (66,) * 95]
            got = await asyncio.gather(
                *(answer(stub, message(prompt, max_tokens=20, ignore_eos=True)) for prompt in prompts)
            )
            for prompt, each in zip(prompts, got, strict=True):
                wanted = solo(Request("solo", prompt, 20, ignore_eos=True), max_len=96)
                assert each.ids == wanted[0]
            await until(lambda: nothing_left(server, engine))

    run(test)


def smollm2_engine(bundle: Path) -> Engine:
    manifest = read_manifest(bundle)
    target, drafter, _ = load_networks(bundle, manifest, EngineOptions())
    return Engine(target, drafter, Tokenizer.load(bundle, manifest.tokenizer), make_policy("ratio:0.5", None))


def test_smollm2_says_the_same_over_both_services(smollm2_bundle_fp32: Path) -> None:
    async def test() -> None:
        engine = smollm2_engine(smollm2_bundle_fp32)
        async with serving(engine) as (server, client), stub_of(server.address) as stub:
            chat = [{"role": "user", "content": "Name three colours, then a café."}]
            prompt = engine.tokenizer.encode(engine.tokenizer.render_chat(chat), add_special_tokens=False)
            for sampling in ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 5}):
                expected = await client.complete(prompt, max_tokens=32, **sampling)
                got = await answer(
                    stub, message(prompt, max_tokens=32, sampling=sampling, include_stop_token_in_output=True)
                )
                assert got.ids == expected.token_ids
                assert (
                    got.completes[0].cached_tokens == (await client.complete(prompt, max_tokens=1)).usage.cached_tokens
                )
            await until(lambda: engine.running == engine.waiting == 0)

    run(test)
