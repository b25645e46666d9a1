"""The parts of the Triton model that know nothing of Triton: conversion, and one final response whatever happens."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest
from live_server import nothing_left, run, serving, until

from dcut_server.generated.dcut.v1 import dcut_pb2
from dcut_trt.backends.scripted import scripted_engine

MODEL = Path(__file__).resolve().parents[2] / "server/triton/model_repository/dcut/1"


def load(name: str) -> ModuleType:
    """By path: server/triton on sys.path would pass for the package `triton`."""
    spec = importlib.util.spec_from_file_location(name, MODEL / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


wire = load("dcut_wire")
relay = load("dcut_relay")


class Recorded:
    """A reply that notes what it was told. left: the client has gone."""

    def __init__(self) -> None:
        self.left = False
        self.sent = 0
        self.finals: list[Any] = []

    def is_cancelled(self) -> bool:
        assert not self.finals, "Triton crashes when it is asked after the final response"
        return self.left

    def send(self, _tensors: Any) -> None:
        self.sent += 1

    def finish(self, _tensors: Any, usage: dcut_pb2.Usage) -> None:
        self.finals.append(usage.output_tokens)

    def fail(self, code: grpc.StatusCode, _message: str) -> None:
        self.finals.append(code)


def text(value: str | bytes) -> Any:
    return np.array([value], object)


def test_every_input_has_its_field() -> None:
    numbers = {"max_tokens": 9, "min_tokens": 2, "top_k": 5, "seed": 7}
    floats = {"temperature": 0.5, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
    penalties = {"presence_penalty": -0.5, "frequency_penalty": 2.0}
    tensors = {f"sampling_param_{name}": np.array([value]) for name, value in (numbers | floats | penalties).items()}
    tensors |= {"text_input": text("grüße".encode()), "streaming": np.array([True])}
    tensors |= {"sampling_param_stop": np.array([b"a", "ß".encode()], object)}
    tensors |= {"sampling_param_stop_token_ids": np.array([3, 4]), "sampling_param_ignore_eos": np.array([True])}
    assert set(tensors) == set(wire.INPUTS)
    message, streaming = wire.request_from_tensors(tensors)
    sampling = {"top_k": 5, "seed": 7, **floats, **penalties}
    expected = dcut_pb2.GenerateRequest(
        text="grüße", max_tokens=9, min_tokens=2, stop=["a", "ß"], stop_token_ids=[3, 4], ignore_eos=True
    )
    expected.sampling.CopyFrom(dcut_pb2.Sampling(**sampling))
    assert (message, streaming) == (expected, True)


def test_absent_inputs_stay_unset() -> None:
    message, streaming = wire.request_from_tensors({"text_input": text("a")})
    assert [field.name for field, _ in message.ListFields()] == ["text"]
    assert not streaming


REFUSED = {
    "none": ({}, "text_input=None"),
    "shape": ({"text_input": np.array(["a", "b"], object)}, r"text_input=\[2\]: the shape"),
    "infinite": ({"text_input": text("a"), "sampling_param_top_p": np.array([np.inf])}, "sampling_param_top_p=inf"),
    "fraction": ({"text_input": text("a"), "sampling_param_top_k": np.array([1.5])}, "top_k=1.5: must be a 64-bit"),
    "no text": ({"text_input": text("a"), "sampling_param_stop": text(b"\xff")}, r"sampling_param_stop=b'\\xff'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_without_a_place_on_the_wire_is_refused_by_name(case: str) -> None:
    tensors, told = REFUSED[case]
    with pytest.raises(wire.TensorRefused, match=told):
        wire.request_from_tensors(tensors)


def test_one_final_response_in_every_case() -> None:
    async def test() -> None:
        engine = scripted_engine(max_len=4096, delay_s=0.002)
        async with serving(engine) as (server, _):
            relaying = relay.Relay(server.address)
            long = dcut_pb2.GenerateRequest(text="a", max_tokens=4000, ignore_eos=True)
            short = dcut_pb2.GenerateRequest(text="a", max_tokens=5, ignore_eos=True)
            refused = dcut_pb2.GenerateRequest(text="", max_tokens=5)
            done, bad, late, gone, cut = (Recorded() for _ in range(5))
            for request, limit_s, reply in (
                (short, None, done),
                (refused, None, bad),
                (long, 0.05, late),
                (long, None, gone),
                (long, None, cut),
            ):
                relaying.submit(relay.Job(request, True, limit_s, reply))
            await until(lambda: gone.sent > 0 and bool(done.finals and bad.finals and late.finals))
            gone.left = True
            await until(lambda: bool(gone.finals))
            await until(lambda: engine.running == 1)
            await asyncio.to_thread(relaying.close)
            assert [reply.finals for reply in (done, bad, late, gone, cut)] == [
                [5],
                [grpc.StatusCode.INVALID_ARGUMENT],
                [grpc.StatusCode.DEADLINE_EXCEEDED],
                [grpc.StatusCode.CANCELLED],
                [grpc.StatusCode.UNAVAILABLE],
            ]
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_a_dead_server_is_unavailable() -> None:
    async def test() -> None:
        relaying, reply = relay.Relay("127.0.0.1:1"), Recorded()
        relaying.submit(relay.Job(dcut_pb2.GenerateRequest(text="a"), False, None, reply))
        await until(lambda: bool(reply.finals))
        await asyncio.to_thread(relaying.close)
        assert reply.finals == [grpc.StatusCode.UNAVAILABLE]

    run(test)
