"""Hugging Face directories: what transformers saves is read as it meant it, and a broken or foreign one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import (
    QWEN3,
    TARGET,
    random_arrays,
    tokenizer_json,
    write_config,
    write_safetensors,
    write_target,
)

from dcut_engines.checkpoint import load_target
from dcut_engines.hf_config import read_decoder_config
from dcut_engines.model_config import RopeConfig
from dcut_engines.sources import Source
from dcut_engines.weights import decoder_shapes
from dcut_trt.errors import UnknownModel, UnsupportedModel

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def load(directory: Path) -> Any:
    return load_target(Source(directory.name, directory))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_what_transformers_saves_is_read_back(tmp_path: Path, architecture: str, tie: bool, shard_size: str) -> None:
    import transformers  # noqa: PLC0415

    names = {"llama": "Llama", "qwen3": "Qwen3"}
    options = {key: value for key, value in TARGET.items() if key not in ("architectures", "model_type", "rope_theta")}
    options |= {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}, "tie_word_embeddings": tie}
    config = getattr(transformers, f"{names[architecture]}Config")(**options)
    model = getattr(transformers, f"{names[architecture]}ForCausalLM")(config)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    assert (tmp_path / "model.safetensors").is_file() == (shard_size == "1GB")

    target = load(tmp_path)
    assert (target.config.architecture, target.config.head_dim, target.config.kv_heads) == (architecture, 8, 2)
    assert (target.config.rope, target.config.tie_word_embeddings) == (RopeConfig(12345.0), tie)
    assert target.config.qk_norm == (architecture == "qwen3")
    theirs = {name: values.numpy() for name, values in model.state_dict().items()}
    if tie:
        del theirs["lm_head.weight"]
    assert set(target.weights) == set(theirs)
    for name, values in theirs.items():
        np.testing.assert_array_equal(target.weights[name], values, err_msg=name)


@pytest.mark.parametrize(("dtype", "accuracy"), [("F32", 0), ("BF16", 2**-7), ("F16", 2**-11)])
def test_every_float_type_widens_to_float32(tmp_path: Path, dtype: str, accuracy: float) -> None:
    target = load(write_target(tmp_path / "tiny", dtype=dtype))
    values = target.weights[Q_PROJ]
    assert values.dtype == np.float32
    original = random_arrays(decoder_shapes(target.config))[Q_PROJ]
    np.testing.assert_allclose(values, original, rtol=accuracy, atol=1e-6 if accuracy else 0)


def test_a_tied_head_that_is_stored_too_is_ignored(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "tiny")
    shapes = decoder_shapes(read_decoder_config(directory))
    arrays = random_arrays(shapes | {"lm_head.weight": shapes["model.embed_tokens.weight"]})
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    write_safetensors(directory / "model.safetensors", arrays)
    assert set(load(directory).weights) == set(shapes)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, RopeConfig(10000.0)),
        ({"rope_theta": None}, RopeConfig(10000.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, RopeConfig(1e6)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(10000.0, "linear", 2.0)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            RopeConfig(5e5, "llama3", 8.0, 64, 1.0, 4.0),
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "beta_fast": 16}},
            RopeConfig(1e6, "yarn", 4.0, 128, beta_fast=16.0),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "attention_factor": 1.5,
                }
            },
            RopeConfig(10000.0, "yarn", 4.0, 32, attention_factor=1.5),
        ),
    ],
)
def test_rope_old_and_new_style(tmp_path: Path, fields: dict[str, Any], rope: RopeConfig) -> None:
    write_config(tmp_path, {**TARGET, **fields})
    assert read_decoder_config(tmp_path).rope == rope


def test_defaults_of_optional_fields(tmp_path: Path) -> None:
    optional = ("head_dim", "num_key_value_heads", "tie_word_embeddings", "rms_norm_eps")
    write_config(tmp_path, {key: value for key, value in TARGET.items() if key not in optional})
    config = read_decoder_config(tmp_path)
    assert (config.head_dim, config.kv_heads, config.tie_word_embeddings) == (8, 4, False)
    write_config(tmp_path, {key: value for key, value in QWEN3.items() if key != "head_dim"})
    assert read_decoder_config(tmp_path).head_dim == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures=['MistralForCausalLM']"),
        ({"architectures": None}, "architectures=None"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config={'quant_method': 'awq'}"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"num_experts": 8}, "num_experts=8"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type='longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type='dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "rope_scaling.mscale=0.7"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention="),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_value(tmp_path: Path, fields: Any, message: str) -> None:
    write_config(tmp_path, {**TARGET, **fields})
    with pytest.raises(UnsupportedModel) as caught:
        read_decoder_config(tmp_path)
    assert message in str(caught.value)


def test_a_sliding_window_that_is_off_does_not_matter(tmp_path: Path) -> None:
    write_config(tmp_path, {**QWEN3, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2})
    assert read_decoder_config(tmp_path).architecture == "qwen3"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_attention_heads": "4"}, "num_attention_heads='4'"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"rope_scaling": ["linear"]}, "rope_scaling=['linear']"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor=None"),
        ({"rope_theta": -1}, "rope_theta=-1"),
        ({"num_key_value_heads": 3}, "3 key-value heads do not divide 4 heads"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
    ],
)
def test_senseless_fields_are_refused_by_name_and_value(tmp_path: Path, fields: Any, message: str) -> None:
    directory = write_target(tmp_path / "tiny")
    if set(fields) & {"num_key_value_heads", "head_dim"}:  # tensors that agree with it, so that only this is wrong
        directory = write_target(tmp_path / "odd", {**TARGET, **fields})
    write_config(directory, {**TARGET, **fields})
    with pytest.raises(UnknownModel) as caught:
        load(directory)
    assert message in str(caught.value)


def test_files_that_are_missing_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"config\.json is missing"):
        load(tmp_path)
    for text in ("", "{", "[1]", "\x00", '{"a":' * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnknownModel, match=r"config\.json"):
            load(tmp_path)
    write_config(tmp_path, TARGET)
    with pytest.raises(UnknownModel, match=r"neither model\.safetensors nor"):
        load(tmp_path)


def test_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "tiny")
    arrays = random_arrays(decoder_shapes(read_decoder_config(directory)))
    path = directory / "model.safetensors"
    write_safetensors(path, {name: values for name, values in arrays.items() if name != Q_PROJ})
    with pytest.raises(UnknownModel, match=rf"{Q_PROJ} \[32, 32\] is missing"):
        load(directory)
    write_safetensors(path, arrays | {Q_PROJ: arrays[Q_PROJ][:16]})
    with pytest.raises(UnknownModel, match=r"is \[16, 32\], its config says \[32, 32\]"):
        load(directory)
    write_safetensors(path, arrays | {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)})
    with pytest.raises(UnsupportedModel, match="q_norm"):
        load(directory)


def test_a_dtype_that_is_not_a_plain_float_is_refused(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "tiny")
    write_safetensors(directory / "model.safetensors", {Q_PROJ: np.zeros((2, 2))}, "I64")
    with pytest.raises(UnsupportedModel, match=f"{Q_PROJ} is I64"):
        load(directory)


def shard(directory: Path, weight_map: dict[str, Any] | None = None) -> Path:
    """Split model.safetensors in two files and an index."""
    arrays = random_arrays(decoder_shapes(read_decoder_config(directory)))
    names = sorted(arrays)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, members in halves.items():
        write_safetensors(directory / file, {name: arrays[name] for name in members})
    placed = {name: file for file, members in halves.items() for name in members}
    index = {"metadata": {}, "weight_map": placed | (weight_map or {})}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
    return directory


def test_a_shard_that_is_missing_or_lacks_its_tensor(tmp_path: Path) -> None:
    directory = shard(write_target(tmp_path / "missing"))
    (directory / "two.safetensors").unlink()
    with pytest.raises(UnknownModel, match=r"names two\.safetensors, which is missing"):
        load(directory)
    other = "one.safetensors" if sorted(load_names(tmp_path)).index(Q_PROJ) % 2 else "two.safetensors"
    with pytest.raises(UnknownModel, match=f"places {Q_PROJ} in {other}, which does not hold it"):
        load(shard(write_target(tmp_path / "lacks"), {Q_PROJ: other}))
    with pytest.raises(UnknownModel, match="is not a file name"):
        load(shard(write_target(tmp_path / "escape"), {Q_PROJ: "../missing/one.safetensors"}))


def load_names(tmp_path: Path) -> list[str]:
    return list(decoder_shapes(read_decoder_config(tmp_path / "missing")))


def test_the_hash_covers_every_file_that_matters(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "tiny")
    seen = {load(directory).sha256, load(shard(write_target(tmp_path / "sharded"))).sha256}
    assert len(seen) == 2
    changes = {
        "config.json": json.dumps({**TARGET, "bos_token_id": 2}),
        "tokenizer.json": tokenizer_json() + "\n",
        "tokenizer_config.json": "{}",
        "generation_config.json": "{}",
        "chat_template.jinja": "x",
    }
    for name, text in changes.items():
        (directory / name).write_text(text, encoding="utf-8")
        seen.add(load(directory).sha256)
    assert len(seen) == 2 + len(changes)
    assert load(directory).sha256 in seen
