"""A target checkpoint, whatever it is stored in: architecture, weights, tokenizer and identity."""

from __future__ import annotations

from dataclasses import dataclass

from dcut_engines.digests import files_sha256
from dcut_engines.gguf_file import read_gguf
from dcut_engines.gguf_target import read_gguf_config, read_gguf_weights
from dcut_engines.hf_config import read_decoder_config
from dcut_engines.model_config import DecoderConfig, Weights
from dcut_engines.safetensors_file import read_tensors, weight_files
from dcut_engines.sources import Source
from dcut_engines.tokenizer_files import TokenizerFiles, read_directory_tokenizer, read_gguf_tokenizer
from dcut_engines.weights import LazyWeights, check_heads, check_shapes, decoder_shapes
from dcut_trt.errors import UnsupportedModel

# Small files that shape what a bundle holds; the tensors' own files are added to them.
DIRECTORY_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class TargetCheckpoint:
    """sha256 is over the checkpoint's files. weights are lazy: each access reads the tensor from disk as float32."""

    identity: str
    sha256: str
    config: DecoderConfig
    weights: Weights
    tokenizer: TokenizerFiles


def load_target(source: Source) -> TargetCheckpoint:
    """Read a Llama or Qwen3 target from a Hugging Face directory or a GGUF file.

    Raises UnknownModel when files are missing, truncated or inconsistent, UnsupportedModel when they are sound and hold
    an architecture or an option that is not served.
    """
    checkpoint = _load_directory(source) if source.path.is_dir() else _load_gguf(source)
    check_heads(str(source.path), checkpoint.config)
    tokens, rows = checkpoint.tokenizer.vocab_size, checkpoint.config.vocab_size
    if tokens > rows:
        raise UnsupportedModel(f"{source.path}: the tokenizer has ids up to {tokens - 1}, the embedding {rows} rows")
    return checkpoint


def _load_gguf(source: Source) -> TargetCheckpoint:
    file = read_gguf(source.path)
    config = read_gguf_config(file)
    return TargetCheckpoint(
        identity=source.identity,
        sha256=files_sha256([source.path]),
        config=config,
        weights=read_gguf_weights(file, config),
        tokenizer=read_gguf_tokenizer(file),
    )


def _load_directory(source: Source) -> TargetCheckpoint:
    config = read_decoder_config(source.path)
    tensors = read_tensors(source.path)
    if config.tie_word_embeddings:  # some checkpoints store the tied head as well
        tensors.pop("lm_head.weight", None)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_shapes(str(source.path), decoder_shapes(config), shapes)
    small = [source.path / name for name in DIRECTORY_FILES if (source.path / name).is_file()]
    return TargetCheckpoint(
        identity=source.identity,
        sha256=files_sha256([*small, *weight_files(source.path)]),
        config=config,
        weights=LazyWeights(shapes, lambda name: tensors[name].read()),
        tokenizer=read_directory_tokenizer(source.path),
    )
