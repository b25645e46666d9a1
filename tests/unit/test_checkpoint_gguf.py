"""GGUF targets: the same weights and config as the checkpoint they were made from, and a typed error for a bad file."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_checkpoints import Arrays, add_field, random_arrays, tiny_decoder, write_gguf

from dcut_engines.checkpoint import load_target
from dcut_engines.gguf_file import read_gguf
from dcut_engines.gguf_target import read_gguf_config, read_gguf_weights
from dcut_engines.model_config import DecoderConfig, RopeConfig
from dcut_engines.sources import Source
from dcut_engines.weights import decoder_shapes
from dcut_trt.errors import DcutError, UnknownModel, UnsupportedModel


def write_tiny(path: Path, config: DecoderConfig, **options: Any) -> tuple[Path, Arrays]:
    arrays = random_arrays(decoder_shapes(config))
    return write_gguf(path, config, arrays, **options), arrays


@pytest.mark.parametrize(
    "config", [tiny_decoder(), tiny_decoder(tie=False), tiny_decoder("qwen3"), tiny_decoder("qwen3", tie=False)]
)
def test_config_and_weights_are_those_of_the_original(tmp_path: Path, config: DecoderConfig) -> None:
    path, arrays = write_tiny(tmp_path / "tiny.gguf", config)
    target = load_target(Source("tiny", path))
    assert target.config == config
    assert set(target.weights) == set(arrays)
    for name, values in arrays.items():
        np.testing.assert_array_equal(target.weights[name], values, err_msg=name)


def test_quantized_tensors_are_expanded(tmp_path: Path) -> None:
    config = tiny_decoder()
    arrays = random_arrays(decoder_shapes(config))
    path = write_gguf(tmp_path / "tiny.gguf", config, arrays)
    name = "model.layers.1.mlp.down_proj.weight"
    writer = gguf.GGUFWriter(tmp_path / "quantized.gguf", "llama")
    packed = gguf.quantize(arrays[name], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.1.ffn_down.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = read_gguf(tmp_path / "quantized.gguf").dequantize("blk.1.ffn_down.weight")
    assert values.shape == arrays[name].shape
    np.testing.assert_allclose(values, read_gguf(path).dequantize("blk.1.ffn_down.weight"), atol=0.003)


def without_tokenizer(original: Path, path: Path) -> Path:
    """The same tensors, byte for byte, without the big arrays that transformers takes ten seconds to parse."""
    file = read_gguf(original)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in file.metadata.items():
        if key.startswith("llama."):
            add_field(writer, key, value)
    for name, tensor in file.tensors.items():
        raw = np.fromfile(original, np.uint8, tensor.size, offset=tensor.offset)
        rows = raw.reshape(*tensor.shape[:-1], -1)  # one-dimensional float32 tensors become one row of bytes
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[tensor.quantization])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_smollm2_weights_are_those_that_transformers_loads(smollm2_gguf: Path, tmp_path: Path) -> None:
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: PLC0415

    file = read_gguf(smollm2_gguf)
    config = read_gguf_config(file)
    weights = read_gguf_weights(file, config)
    names = ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                **{name: getattr(config, name) for name in names},
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                tie_word_embeddings=True,
            )
        )
    bare = without_tokenizer(smollm2_gguf, tmp_path / "bare.gguf")
    theirs = load_gguf_checkpoint(str(bare), return_tensors=True, model_to_load=model)["tensors"]
    assert set(theirs) == set(weights)
    for name, values in theirs.items():
        np.testing.assert_array_equal(weights[name], values.numpy(), err_msg=name)


def test_smollm2_config(smollm2_gguf: Path) -> None:
    config = read_gguf_config(read_gguf(smollm2_gguf))
    assert (config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.max_position, config.rms_norm_eps) == (49152, 8192, 1e-5)
    assert config.rope == RopeConfig(100000.0)
    assert config.tie_word_embeddings


def llama3_factors(theta: float, head_dim: int, factor: float) -> NDArray[np.float32]:
    """As llama.cpp's converter computes rope_freqs.weight from Llama 3.1's config, one frequency at a time."""
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (index / head_dim)
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_rope_of_llama3_is_recognised_by_its_frequency_factors(tmp_path: Path) -> None:
    theta, head_dim = 500000.0, 64
    wide = random_arrays(decoder_shapes(config := llama_with_head_dim(head_dim)))
    fields = {"llama.rope.freq_base": theta}
    factors = llama3_factors(theta, head_dim, 8.0)
    path = write_gguf(tmp_path / "a.gguf", config, wide, fields, {"rope_freqs.weight": factors})
    expected = RopeConfig(theta, "llama3", 8.0, 8192, 1.0, 4.0)
    assert read_gguf_config(read_gguf(path)).rope == expected
    strange = {"rope_freqs.weight": factors[::-1].copy()}
    path = write_gguf(tmp_path / "b.gguf", config, wide, fields, strange)
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        read_gguf_config(read_gguf(path))


def llama_with_head_dim(head_dim: int) -> DecoderConfig:
    tiny = tiny_decoder()
    names = [name for name in tiny.__slots__ if name not in ("head_dim", "rope")]
    return DecoderConfig(**{name: getattr(tiny, name) for name in names}, head_dim=head_dim, rope=RopeConfig(500000.0))


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"llama.rope.scaling.type": "none"}, RopeConfig(10000.0)),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            RopeConfig(10000.0, "linear", 2.0),
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            RopeConfig(10000.0, "yarn", 4.0, 32),
        ),
    ],
)
def test_rope_kinds(tmp_path: Path, fields: dict[str, Any], rope: RopeConfig) -> None:
    path, _ = write_tiny(tmp_path / "tiny.gguf", tiny_decoder(), fields=fields)
    assert read_gguf_config(read_gguf(path)).rope == rope


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture='mamba'"),
        ({"llama.attention.sliding_window": 64}, "sliding_window=64"),
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"llama.attention.value_length": 16}, "value_length=16"),
        ({"llama.rope.dimension_count": 4}, "dimension_count=4"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "scaling.type='longrope'"),
        ({"split.count": 3}, "split.count=3"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model='llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre='tekken'"),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_value(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path, _ = write_tiny(tmp_path / "tiny.gguf", tiny_decoder(), fields=fields)
    with pytest.raises(UnsupportedModel, match=message.replace(".", r"\.")):
        load_target(Source("tiny", path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.block_count": None}, "block_count=None"),
        ({"llama.embedding_length": 0}, "embedding_length=0"),
        ({"llama.attention.head_count_kv": 3}, "key-value heads"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base=nan"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["zz"]}, "merges"),
        ({"tokenizer.ggml.merges": ["x nosuchtoken"]}, "merges"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "5000"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "bos_token_id=None"),
    ],
)
def test_senseless_metadata_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    config = tiny_decoder()
    if "llama.attention.head_count_kv" in fields:  # shapes that agree with it, so that only the heads are wrong
        names = [name for name in config.__slots__ if name != "kv_heads"]
        config = DecoderConfig(**{name: getattr(config, name) for name in names}, kv_heads=3)
    path, _ = write_tiny(tmp_path / "tiny.gguf", config, fields=fields)
    with pytest.raises(UnknownModel, match=message):
        load_target(Source("tiny", path))


def test_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    config = tiny_decoder()
    arrays = random_arrays(decoder_shapes(config))
    name = "model.layers.1.self_attn.k_proj.weight"
    without = {key: values for key, values in arrays.items() if key != name}
    for case, tensors, extra, kind in (
        ("missing", without, {}, UnknownModel),
        ("shape", arrays | {name: np.zeros((16, 16), np.float32)}, {}, UnknownModel),
        ("extra", arrays, {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}, UnsupportedModel),
        ("bias", arrays, {"blk.0.ffn_up.bias": np.zeros(64, np.float32)}, UnsupportedModel),
    ):
        file = read_gguf(write_gguf(tmp_path / f"{case}.gguf", config, tensors, extra=extra))
        with pytest.raises(kind, match=r"k_proj|attn_sinks|mlp\.up_proj\.bias"):
            read_gguf_weights(file, config)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"PK\x03\x04" + bytes(100), b"GGUF" + struct.pack("<I", 99) + bytes(16)):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(UnknownModel, match="not a readable GGUF file"):
            read_gguf(tmp_path / "x.gguf")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path, _ = write_tiny(tmp_path / "tiny.gguf", tiny_decoder())
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(1, 400, 7), *range(400, len(whole) - 1, len(whole) // 100), len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(UnknownModel, match="not a readable GGUF file"):
            read_gguf(cut)


@pytest.mark.parametrize("position", [8, 16])  # tensor count, metadata count
def test_wild_counts_are_refused_quickly(tmp_path: Path, position: int) -> None:
    path, _ = write_tiny(tmp_path / "tiny.gguf", tiny_decoder())
    data = bytearray(path.read_bytes())
    data[position : position + 8] = struct.pack("<Q", 2**62)
    path.write_bytes(data)
    with pytest.raises(UnknownModel):
        read_gguf(path)


def test_an_array_that_claims_more_strings_than_the_file_has_bytes(tmp_path: Path) -> None:
    path, _ = write_tiny(tmp_path / "tiny.gguf", tiny_decoder())
    data = path.read_bytes()
    at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8  # array type, then the count
    path.write_bytes(data[:at] + struct.pack("<Q", 2**40) + data[at + 8 :])
    with pytest.raises(UnknownModel, match="does not fit"):
        read_gguf(path)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    path, _ = write_tiny(tmp_path / "tiny.gguf", tiny_decoder())
    data = path.read_bytes()
    # name, dimension count, one dimension, type, then the offset of this one-dimensional tensor
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8 + 4
    path.write_bytes(data[:at] + struct.pack("<Q", 0) + data[at + 8 :])
    with pytest.raises(UnknownModel, match="overlaps"):
        read_gguf(path)


def test_random_damage_to_the_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    path, _ = write_tiny(tmp_path / "tiny.gguf", tiny_decoder())
    whole = path.read_bytes()
    header = whole.index(b"blk.1.ffn_down.weight") + 100
    rng = random.Random(0)
    damaged_path = tmp_path / "damaged.gguf"
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(header)] = rng.randrange(256)
        damaged_path.write_bytes(damaged)
        try:
            load_target(Source("damaged", damaged_path))
        except DcutError:
            continue
