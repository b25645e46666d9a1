"""DFlash drafters: read as their format says, and refused, with both names, for a target they were not trained for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tiny_checkpoints import (
    DRAFTER,
    drafter_shapes_of,
    random_arrays,
    write_config,
    write_drafter,
    write_target,
)

from dcut_engines.checkpoint import load_target
from dcut_engines.drafter_checkpoint import DrafterCheckpoint, check_drafter_fits, load_drafter, read_draft_vocab
from dcut_engines.model_config import DrafterConfig, RopeConfig
from dcut_engines.sources import Source, resolve_drafter
from dcut_trt.errors import UnknownModel, UnsupportedModel

FLASH = DRAFTER["dflash_config"]


def load(directory: Path) -> DrafterCheckpoint:
    return load_drafter(Source(directory.name, directory))


def test_config_and_weights(tmp_path: Path) -> None:
    drafter = load(write_drafter(tmp_path / "tiny", draft_vocab=[5, 2, 9]))
    assert drafter.config == DrafterConfig(
        layers=1,
        hidden_size=32,
        intermediate_size=48,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocab_size=272,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        attention_bias=False,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=(0, 1),
        num_target_layers=2,
        causal=True,
    )
    assert drafter.draft_vocab == (2, 5, 9)
    arrays = random_arrays(drafter_shapes_of(DRAFTER), seed=7)
    assert set(drafter.weights) == set(arrays)
    for name, values in arrays.items():
        np.testing.assert_array_equal(drafter.weights[name], values)


def test_a_block_is_bidirectional_unless_the_config_says_causal(tmp_path: Path) -> None:
    config = {**DRAFTER, "dflash_config": {key: FLASH[key] for key in ("mask_token_id", "target_layer_ids")}}
    drafter = load(write_drafter(tmp_path / "tiny", config))
    assert not drafter.config.causal
    assert drafter.draft_vocab is None


def test_layers_keep_the_order_of_the_config(tmp_path: Path) -> None:
    config = {**DRAFTER, "dflash_config": {**FLASH, "target_layer_ids": [1, 0]}}
    assert load(write_drafter(tmp_path / "tiny", config)).config.target_layer_ids == (1, 0)


def test_rope_of_transformers_5(tmp_path: Path) -> None:
    config = {key: value for key, value in DRAFTER.items() if key != "rope_theta"}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert load(write_drafter(tmp_path / "tiny", config)).config.rope == RopeConfig(1e6)


def test_the_shipped_drafter_fits_smollm2(smollm2_gguf: Path) -> None:
    source = resolve_drafter("smollm2-135m-dflash-b8")
    drafter = load_drafter(source)
    check_drafter_fits(drafter, load_target(Source("smollm2-135m-instruct", smollm2_gguf)))
    config = drafter.config
    assert (config.block_size, config.draft_length, config.layers, config.target_layer_ids) == (8, 7, 3, (1, 14, 27))
    assert config.causal
    assert drafter.draft_vocab is not None
    assert len(drafter.draft_vocab) == 8192
    with safe_open(source.path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(drafter.weights)
        for name in file.keys():  # noqa: SIM118  # not a dict
            np.testing.assert_array_equal(drafter.weights[name], file.get_tensor(name).float().numpy())


@pytest.mark.parametrize(
    ("fields", "flash", "kind", "message"),
    [
        ({"block_size": None}, {}, UnknownModel, "block_size=None"),
        ({"block_size": 1}, {}, UnknownModel, "block_size=1"),
        ({"block_size": 4096}, {}, UnknownModel, "block_size=4096: at most 64"),
        ({"num_target_layers": None}, {}, UnknownModel, "num_target_layers=None"),
        (
            {},
            {"target_layer_ids": [0, 2]},
            UnknownModel,
            "dflash_config.target_layer_ids=[0, 2]: the target has layers 0",
        ),
        ({}, {"target_layer_ids": [1, 1]}, UnknownModel, "dflash_config.target_layer_ids=[1, 1]"),
        ({}, {"target_layer_ids": []}, UnknownModel, "dflash_config.target_layer_ids=[]"),
        ({}, {"target_layer_ids": ["0"]}, UnknownModel, "dflash_config.target_layer_ids=['0']"),
        ({}, {"mask_token_id": 272}, UnknownModel, "dflash_config.mask_token_id=272"),
        ({}, {"mask_token_id": None}, UnknownModel, "dflash_config.mask_token_id=None"),
        ({}, {"causal": "no"}, UnknownModel, "dflash_config.causal='no'"),
        ({}, {"target": {"name": 3}}, UnknownModel, "dflash_config.target.name=3"),
        ({}, {"gating": True}, UnsupportedModel, "dflash_config.gating=True"),
        ({"use_sliding_window": True}, {}, UnsupportedModel, "use_sliding_window=True"),
        ({"hidden_act": "gelu"}, {}, UnsupportedModel, "hidden_act='gelu'"),
    ],
)
def test_configs_that_are_refused(
    tmp_path: Path, fields: dict[str, Any], flash: dict[str, Any], kind: type[Exception], message: str
) -> None:
    directory = write_drafter(tmp_path / "tiny")
    write_config(directory, {**DRAFTER, **fields, "dflash_config": {**FLASH, **flash}})
    with pytest.raises(kind) as caught:
        load(directory)
    assert message in str(caught.value)


def test_a_plain_model_is_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="not a DFlash drafter"):
        load(write_target(tmp_path / "tiny"))


def test_features_of_another_width_are_refused(tmp_path: Path) -> None:
    directory = write_drafter(tmp_path / "tiny")
    write_config(directory, {**DRAFTER, "dflash_config": {**FLASH, "target_layer_ids": [0]}})
    with pytest.raises(UnknownModel, match=r"fc\.weight is \[32, 64\], its config says \[32, 32\]"):
        load(directory)


@pytest.mark.parametrize("ids", [[], {}, "x", [1, "2"], [True], [-1], [272], [1.5], [3, 3]])
def test_draft_vocabularies_that_are_refused(tmp_path: Path, ids: Any) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    with pytest.raises(UnknownModel, match=r"draft vocabulary .*ids\.json"):
        read_draft_vocab(tmp_path / "ids.json", 272)


def test_a_draft_vocabulary_that_is_not_there_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="cannot be read"):
        read_draft_vocab(tmp_path / "ids.json", 272)
    (tmp_path / "ids.json").write_text("[1,")
    with pytest.raises(UnknownModel, match="cannot be read"):
        read_draft_vocab(tmp_path / "ids.json", 272)
