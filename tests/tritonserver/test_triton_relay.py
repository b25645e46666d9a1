"""The parts of the Triton model that know nothing of Triton: conversion of requests, and a server that is not there."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from live_server import run, until
from relay_parts import Recorded, relay, wire

from dcut_server.generated.dcut.v1 import dcut_pb2


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


def test_a_dead_server_is_unavailable() -> None:
    async def test() -> None:
        relaying, reply = relay.Relay("127.0.0.1:1"), Recorded()
        relaying.submit(relay.Job(dcut_pb2.GenerateRequest(text="a"), False, None, reply))
        await until(lambda: bool(reply.finals))
        await asyncio.to_thread(relaying.close)
        assert reply.finals == [grpc.StatusCode.UNAVAILABLE]

    run(test)
