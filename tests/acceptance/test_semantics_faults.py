"""S7: where the network itself says NaN, the greedy request that it hits fails alone, and leaves nothing behind."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scripted_runs import POLICIES, Stream, expected, letters, letters_script, requests, run_all
from tiny_bundles import changed, tiny_options
from tiny_checkpoints import TARGET, write_safetensors, write_target

from dcut_engines.bundle import build
from dcut_trt.backends.openvino import load_openvino
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.errors import StepFailed
from dcut_trt.manifest import read_manifest
from dcut_trt.spec.policies import make_policy
from dcut_trt.tokenizer import Tokenizer
from dcut_trt.types import Request

BROKEN = 77  # the token whose embedding is NaN
UNTIED = {**TARGET, "tie_word_embeddings": False}  # else the head would be NaN for everybody


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("offset", [0, 1, 10])
def test_s7_a_greedy_request_fails_where_its_row_is_nan_and_its_neighbours_go_on(policy: str, offset: int) -> None:
    script = deepcopy(letters_script(1e9))
    victim, neighbours = Request("victim", letters("poison me"), 30), requests(4, 30)
    tokens, _, _ = expected(script, victim)
    script.logits[script.state([*victim.prompt_ids, *tokens[:offset]])] = np.nan
    streams = run_all(scripted_engine(policy, script=script, accuracy=0.9), *neighbours[:2], victim, *neighbours[2:])
    error = streams["victim"].error
    assert isinstance(error, StepFailed)
    place = len(victim.prompt_ids) + offset
    assert str(error) == f"request_id='victim': the target's hidden states at position {place} are not finite"
    assert streams["victim"].tokens == tokens[: len(streams["victim"].tokens)]
    for request in neighbours:
        assert streams[request.request_id].outcome == expected(script, request)


@pytest.fixture(scope="module")
def broken_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target in fp32 with one embedding that is NaN."""
    folder = tmp_path_factory.mktemp("broken")
    options = tiny_options(folder)
    target = write_target(folder / "broken-target", UNTIED)
    arrays = load_file(target / "model.safetensors")
    arrays["model.embed_tokens.weight"][BROKEN] = np.nan
    write_safetensors(target / "model.safetensors", arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCUT_CACHE", str(folder / "cache"))
        return build(changed(options, target=str(target)))


def opened(bundle: Path, policy: str) -> Engine:
    manifest = read_manifest(bundle)
    networks = load_openvino(bundle, manifest, EngineOptions(kv_memory_mib=64))
    return Engine(*networks, Tokenizer.load(bundle, manifest.tokenizer), make_policy(policy, None), prefix_cache=False)


def answers(engine: Engine, *crowd: Request) -> dict[str, Stream]:
    for request in crowd:
        engine.submit(request)
    streams = {request.request_id: Stream() for request in crowd}
    while engine.has_work:
        for event in engine.step():
            streams[event.request_id].add(event)
    return streams


@pytest.mark.parametrize("policy", ["plain", "dflash", "ratio:0.5"])
def test_s7_a_nan_in_the_weights_fails_the_prompts_that_read_it_alone(broken_bundle: Path, policy: str) -> None:
    """Also later: the blocks of those that failed hold NaN, and go to others, who must not read it."""
    engine = opened(broken_bundle, policy)
    good = [Request(f"good{index}", tuple(range(100 + index, 112 + index)), 30, ignore_eos=True) for index in range(4)]
    prompts = {"first": (BROKEN, 100, 101), "middle": (*range(100, 140), BROKEN, 101), "last": (100, BROKEN)}
    bad = [Request(name, prompt, 30, ignore_eos=True) for name, prompt in prompts.items()]
    alone = {request.request_id: answers(engine, request)[request.request_id] for request in good}
    assert all(stream.error is None and BROKEN not in stream.tokens for stream in alone.values())
    for crowd in (good + bad[:2], [bad[2], *good], bad, good):
        streams = answers(engine, *crowd)
        for request in crowd:
            stream = streams[request.request_id]
            if request in good:
                assert stream.outcome == alone[request.request_id].outcome
            else:
                assert isinstance(stream.error, StepFailed)
                assert f"request_id='{request.request_id}'" in str(stream.error)
                assert stream.tokens == []
        assert engine.free_blocks == engine.scheduler.pool.num_blocks
    engine.close()
