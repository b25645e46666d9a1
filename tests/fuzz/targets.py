"""What strangers' bytes reach: each target takes bytes, and may refuse them with a DcutError but never break."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import trtllm_service_pb2

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from tiny_checkpoints import (
    TARGET,
    random_arrays,
    tiny_decoder,
    tokenizer_json,
    write_gguf,
    write_safetensors,
)

from dcut_engines.gguf_file import read_gguf
from dcut_engines.gguf_target import read_gguf_config, read_gguf_weights
from dcut_engines.safetensors_file import read_tensors
from dcut_engines.tokenizer_files import read_directory_tokenizer, read_gguf_tokenizer
from dcut_engines.weights import decoder_shapes
from dcut_server import convert, trtllm_convert
from dcut_server.fan_out import expand
from dcut_server.generated.dcut.v1 import dcut_pb2
from dcut_trt.admission import check_request
from dcut_trt.backends.base import Limits
from dcut_trt.backends.scripted import byte_tokenizer, scripted_engine
from dcut_trt.errors import DcutError
from dcut_trt.manifest import TokenizerSpec, read_manifest, verify_files
from dcut_trt.tokenizer import Tokenizer

LIMITS: Limits = scripted_engine().limits
TOKENIZER = byte_tokenizer()


def request(data: bytes) -> None:
    """A Generate message off the wire, up to admission."""
    try:
        message = dcut_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        return
    check_request(convert.request_from_proto(message, TOKENIZER, LIMITS.max_len, None), LIMITS)


def trtllm_request(data: bytes) -> None:
    """The same of a gateway in front of TensorRT-LLM."""
    try:
        message = trtllm_service_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        return
    call = trtllm_convert.call_from_proto(message, None)
    for part in expand(call.request, call.streams):
        check_request(part, LIMITS)


def manifest(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "manifest.json").write_bytes(data)
        verify_files(path, read_manifest(path))


def safetensors(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(data)
        for tensor in read_tensors(Path(folder)).values():
            tensor.read()


def gguf(data: bytes) -> None:
    """Metadata, tokenizer and every weight that the config asks for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(data)
        file = read_gguf(path)
        read_gguf_tokenizer(file)
        weights = read_gguf_weights(file, read_gguf_config(file))
        for name in weights:
            weights[name]


def tokenizer(data: bytes) -> None:
    """A tokenizer.json, at build time and in the runtime, and a text there and back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "tokenizer.json").write_bytes(data)
        (path / "config.json").write_text(json.dumps(TARGET))
        files = read_directory_tokenizer(path)
        spec = TokenizerSpec(files.vocabulary_sha256, files.vocab_size, files.bos_id, files.eos_ids)
        loaded = Tokenizer.load(path, spec)
        loaded.decode(loaded.encode("héllo the wörld \U0001f642"))


TARGETS: dict[str, Callable[[bytes], None]] = {
    function.__name__: function for function in (request, trtllm_request, manifest, safetensors, gguf, tokenizer)
}


def survive(name: str, data: bytes) -> bool:
    """Whether the bytes were taken; False when they were refused as they may be."""
    try:
        TARGETS[name](data)
    except DcutError:
        return False
    return True


def seeds(name: str) -> list[bytes]:
    """Valid inputs to start from."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        match name:
            case "request":
                sampling = dcut_pb2.Sampling(temperature=0.5, top_k=4, top_p=0.9, seed=7, logit_bias={5: 1.5})
                text = dcut_pb2.GenerateRequest(text="hello", max_tokens=9, sampling=sampling, stop=["x"], n=1)
                chat = dcut_pb2.GenerateRequest(chat={"messages": [{"role": "user", "content": "hi"}]})
                ids = dcut_pb2.GenerateRequest(token_ids={"ids": [1, 2, 3]}, stop_token_ids=[4], logprobs=2)
                return [message.SerializeToString() for message in (text, chat, ids)]
            case "trtllm_request":
                return trtllm_seeds()
            case "manifest":
                return [(Path(__file__).parent / "manifest.json").read_bytes()]
            case "safetensors":
                shapes = dict(list(decoder_shapes(tiny_decoder()).items())[:4])
                write_safetensors(path / "a", random_arrays(shapes))
                return [(path / "a").read_bytes()]
            case "gguf":
                decoder = tiny_decoder()
                arrays = random_arrays(decoder_shapes(decoder))
                return [write_gguf(path / "a", decoder, arrays).read_bytes()]
            case _:
                return [tokenizer_json().encode()]


def trtllm_seeds() -> list[bytes]:
    """A greedy message, and one with every option that is served."""
    prompt = trtllm_service_pb2.TokenizedInput(input_token_ids=[1, 2, 3])
    greedy = trtllm_service_pb2.GenerateRequest(
        request_id="a",
        tokenized=prompt,
        sampling_config=trtllm_service_pb2.SamplingConfig(beam_width=1, temperature=0.0),
        output_config=trtllm_service_pb2.OutputConfig(exclude_input_from_output=True),
        max_tokens=9,
    )
    sampling = trtllm_service_pb2.SamplingConfig(
        beam_width=1, num_return_sequences=2, top_k=5, top_p=0.5, temperature=0.7, seed=3, repetition_penalty=1.5
    )
    sampled = trtllm_service_pb2.GenerateRequest(
        request_id="b", tokenized=prompt, sampling_config=sampling, max_tokens=9, streaming=True, stop_token_ids=[4]
    )
    return [message.SerializeToString() for message in (greedy, sampled)]
