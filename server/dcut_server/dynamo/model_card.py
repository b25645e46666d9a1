"""The directory that Dynamo's frontend tokenizes and renders chats by, written from an engine bundle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcut_engines.digests import cache_dir, write_atomic
from dcut_trt.errors import BundleError
from dcut_trt.manifest import Manifest, read_manifest

# What the graphs of each architecture are called by Hugging Face: the name of the class, and the kind of model.
ARCHITECTURES = {"llama": ("LlamaForCausalLM", "llama"), "qwen3": ("Qwen3ForCausalLM", "qwen3")}


def default_card_dir(bundle: Path) -> Path:
    """In the cache, one for every bundle. Raises BundleError for a directory that is no bundle."""
    return cache_dir() / "dynamo" / read_manifest(bundle).key[:16]


def write_model_card(bundle: Path, out: Path) -> Manifest:
    """Fill `out` with config, generation config, tokenizer and chat template of a bundle; its manifest.

    Workers of one bundle may share `out`: all write the same. Raises BundleError for a directory that is no bundle.
    """
    manifest = read_manifest(bundle)
    tokenizer = _read(bundle / "tokenizer.json")
    template = bundle / "chat_template.jinja"
    configs = {
        "config.json": _config(manifest),
        "generation_config.json": _token_ids(manifest),
        "tokenizer_config.json": _tokenizer_config(
            manifest, json.loads(tokenizer), _read(template) if template.is_file() else None
        ),
    }
    for name, config in configs.items():
        write_atomic(out / name, json.dumps(config, indent=2) + "\n")
    write_atomic(out / "tokenizer.json", tokenizer)
    return manifest


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error


def _config(manifest: Manifest) -> dict[str, Any]:
    target = manifest.target
    architecture, kind = ARCHITECTURES.get(target.architecture, (target.architecture, target.architecture))
    return {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": target.layers,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": manifest.max_len,
        **_token_ids(manifest),
    }


def _token_ids(manifest: Manifest) -> dict[str, Any]:
    spec = manifest.tokenizer
    eos: int | Sequence[int] = spec.eos_ids[0] if len(spec.eos_ids) == 1 else list(spec.eos_ids)
    return {"eos_token_id": eos} | ({} if spec.bos_id is None else {"bos_token_id": spec.bos_id})


def _tokenizer_config(manifest: Manifest, tokenizer: dict[str, Any], template: str | None) -> dict[str, Any]:
    spec = manifest.tokenizer
    added = {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}
    eos = next((added[token] for token in spec.eos_ids if token in added), None)
    named = {
        "bos_token": None if spec.bos_id is None else added.get(spec.bos_id),
        "eos_token": eos,
        "chat_template": template,
    }
    config: dict[str, Any] = {"model_max_length": manifest.max_len, "tokenizer_class": "PreTrainedTokenizerFast"}
    return config | {name: value for name, value in named.items() if value is not None}
