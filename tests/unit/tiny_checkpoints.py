"""Hand-made checkpoints of a few thousand parameters: Hugging Face directories, GGUF files and DFlash drafters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dcut_engines.hf_config import read_decoder_config
from dcut_engines.model_config import DecoderConfig, RopeConfig
from dcut_engines.weights import decoder_shapes

Arrays = dict[str, NDArray[np.float32]]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "Ġ"), ("a", "b")]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *ALPHABET, *("".join(pair) for pair in MERGES)]
VOCAB_SIZE = 272  # padded: the tokenizer has fewer
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
QWEN3 = {**TARGET, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False}
DRAFTER = {
    **{key: TARGET[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")},
    **{key: TARGET[key] for key in ("num_key_value_heads", "vocab_size", "rms_norm_eps", "rope_theta")},
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 1,
    "num_target_layers": 2,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1], "causal": True},
}


def random_arrays(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def write_safetensors(path: Path, arrays: Mapping[str, NDArray[Any]], dtype: str = "F32") -> None:
    """The safetensors format, written without its package, so that broken files can be made from it too."""
    header, data = {}, b""
    for name, values in arrays.items():
        raw = encode(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    write_safetensors_parts(path, header, data)


def write_safetensors_parts(path: Path, header: Any, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def encode(values: NDArray[Any], dtype: str) -> bytes:
    if dtype == "BF16":  # the upper half of a float32; exact for values that bf16 can hold
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2", "I64": "<i8"}[dtype]).tobytes()


def tokenizer_json() -> str:
    vocab = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return tokenizer.to_str()


def write_target(directory: Path, config: Mapping[str, Any] = TARGET, seed: int = 0, dtype: str = "F32") -> Path:
    """A Hugging Face directory with random weights."""
    directory.mkdir(parents=True)
    write_config(directory, config)
    write_safetensors(
        directory / "model.safetensors", random_arrays(decoder_shapes(read_decoder_config(directory)), seed), dtype
    )
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def drafter_shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Written out from the DFlash format, independently of the product's own table."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(config["dflash_config"]["target_layer_ids"])),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (head,) for name in "qk"}
        shapes |= {
            f"{prefix}.self_attn.{name}_proj.weight": (size, hidden) for name, size in (("q", query), ("k", key))
        }
        shapes |= {
            f"{prefix}.self_attn.v_proj.weight": (key, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
        }
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def write_drafter(directory: Path, config: Mapping[str, Any] = DRAFTER, draft_vocab: Any = None) -> Path:
    """A DFlash directory with random weights."""
    directory.mkdir(parents=True)
    write_config(directory, config)
    write_safetensors(directory / "model.safetensors", random_arrays(drafter_shapes_of(config), seed=7))
    if draft_vocab is not None:
        (directory / "draft_vocab.json").write_text(json.dumps(draft_vocab), encoding="utf-8")
    return directory


def tiny_decoder(architecture: str = "llama", *, tie: bool = True) -> DecoderConfig:
    return DecoderConfig(
        architecture=architecture,  # type: ignore[arg-type]
        layers=2,
        hidden_size=32,
        intermediate_size=64,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        max_position=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        tie_word_embeddings=tie,
        attention_bias=False,
        qk_norm=architecture == "qwen3",
    )


GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_LAYER_NAMES[rest]}.{kind}"


def llama_cpp_order(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The row order in which llama.cpp's converter writes q and k of a llama."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    config: DecoderConfig,
    arrays: Mapping[str, NDArray[np.float32]],
    fields: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it. fields override or (None) drop metadata; extra adds tensors."""
    writer = gguf.GGUFWriter(path, config.architecture)
    metadata: dict[str, Any] = {
        f"{config.architecture}.block_count": config.layers,
        f"{config.architecture}.context_length": config.max_position,
        f"{config.architecture}.embedding_length": config.hidden_size,
        f"{config.architecture}.feed_forward_length": config.intermediate_size,
        f"{config.architecture}.attention.head_count": config.heads,
        f"{config.architecture}.attention.head_count_kv": config.kv_heads,
        f"{config.architecture}.attention.key_length": config.head_dim,
        f"{config.architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{config.architecture}.rope.freq_base": config.rope.theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*TOKENS, *(f"[PAD{index}]" for index in range(len(TOKENS), config.vocab_size))],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3) + [5] * (config.vocab_size - len(TOKENS)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **(fields or {}),
    }
    for key, value in metadata.items():
        add_field(writer, key, value)
    for name, values in arrays.items():
        stored = values
        if config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            stored = llama_cpp_order(values, config.heads if ".q_proj." in name else config.kv_heads)
        writer.add_tensor(gguf_name(name), stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.architecture":  # the writer's constructor has set it
        writer.kv_data[0][key].value = value
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_array(key, value)
