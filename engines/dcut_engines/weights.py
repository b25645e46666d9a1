"""Which tensors an architecture needs, and a lazy mapping that holds a checkpoint to exactly those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from dcut_engines.model_config import DecoderConfig, DrafterConfig
from dcut_trt.errors import UnknownModel, UnsupportedModel

Shape = tuple[int, ...]


class LazyWeights(Mapping[str, NDArray[np.float32]]):
    """Weights that are read from disk, as float32, each time they are asked for; nothing is kept."""

    def __init__(self, shapes: Mapping[str, Shape], read: Callable[[str], NDArray[np.float32]]) -> None:
        self.shapes = shapes
        self._read = read

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        if name not in self.shapes:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def check_shapes(source: str, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    """Hold a checkpoint's tensor table to what its own config announces.

    Raises UnknownModel for a missing or misshapen tensor, UnsupportedModel for one the architecture has no use for.
    """
    for name, shape in expected.items():
        if name not in found:
            raise UnknownModel(f"{source}: tensor {name} {list(shape)} is missing")
        if found[name] != shape:
            raise UnknownModel(f"{source}: tensor {name} is {list(found[name])}, its config says {list(shape)}")
    extra = sorted(set(found) - set(expected))
    if extra:
        raise UnsupportedModel(
            f"{source}: tensor {extra[0]} ({len(extra)} such) has no place in this architecture; "
            "ignoring it would change what the model computes"
        )


def check_heads(source: str, config: DecoderConfig | DrafterConfig) -> None:
    """Raise UnknownModel unless kv heads divide the heads and a head can be turned in pairs."""
    if config.heads % config.kv_heads:
        raise UnknownModel(f"{source}: {config.kv_heads} key-value heads do not divide {config.heads} heads")
    if config.head_dim % 2:
        raise UnknownModel(f"{source}: head_dim={config.head_dim} is odd; rotary embedding needs pairs")


def decoder_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Tensor shapes of a Llama or Qwen3 checkpoint by their Hugging Face names; linear weights are [out, in]."""
    embedding = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": embedding, "model.norm.weight": (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = embedding
    for layer in range(config.layers):
        shapes |= _layer_shapes(f"model.layers.{layer}.", config, qk_norm=config.qk_norm)
    return shapes


def drafter_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """Tensor shapes of a DFlash checkpoint; embedding and head are the target's and not in it."""
    features = len(config.target_layer_ids) * config.hidden_size
    shapes: dict[str, Shape] = {
        "fc.weight": (config.hidden_size, features),
        "hidden_norm.weight": (config.hidden_size,),
        "norm.weight": (config.hidden_size,),
    }
    for layer in range(config.layers):
        shapes |= _layer_shapes(f"layers.{layer}.", config, qk_norm=True)
    return shapes


def _layer_shapes(prefix: str, config: DecoderConfig | DrafterConfig, *, qk_norm: bool) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    if config.attention_bias:
        sizes = {"q": query, "k": key, "v": key, "o": hidden}
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    return {prefix + name: shape for name, shape in shapes.items()}
