"""Bundles: what one holds, when it is built again, and that nobody ever sees half of one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_bundles import changed, read_graph, tiny_options, wrote
from tiny_checkpoints import CHAT_TEMPLATE, DRAFTER, QWEN3, TARGET, TOKENS, write_drafter, write_target

from dcut_engines import bundle as bundle_module
from dcut_engines.build_options import BuildOptions, InvalidOption
from dcut_engines.bundle import build
from dcut_engines.checkpoint import load_target
from dcut_engines.sources import resolve_target
from dcut_trt.errors import UnknownModel
from dcut_trt.manifest import Manifest, file_sha256, read_manifest, verify_files
from dcut_trt.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCUT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    return tiny_options(tmp_path)


# --- what a bundle holds


def test_a_bundle_is_what_its_manifest_says(options: BuildOptions) -> None:
    out = build(options)
    assert out == options.out
    manifest = read_manifest(out)
    verify_files(out, manifest)
    listed = {"manifest.json", *manifest.files}
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == listed
    assert {"target.xml", "target.bin", "drafter.xml", "drafter.bin", "tokenizer.json", "chat_template.jinja"} <= listed
    assert (out / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    target = load_target(resolve_target(options.target))
    assert (manifest.target.identity, manifest.target.sha256) == ("target", target.sha256)
    assert (manifest.target.architecture, manifest.target.layers, manifest.target.vocab_size) == ("llama", 2, 272)
    assert (manifest.drafter.identity, manifest.drafter.block_size, manifest.draft_length) == ("drafter", 4, 3)
    assert (manifest.drafter.target_layer_ids, manifest.drafter.draft_vocab_size) == ((0, 1), 272)
    assert (manifest.tokenizer.vocab_size, manifest.tokenizer.bos_id) == (len(TOKENS), 1)
    assert manifest.tokenizer.eos_ids == (0, 2)
    assert manifest.tokenizer.sha256 == file_sha256(out / "tokenizer.json")
    assert Tokenizer.load(out, manifest.tokenizer).encode("ab") == [TOKENS.index("ab")]
    assert (manifest.backend, manifest.precision, manifest.max_batch, manifest.max_len) == ("openvino", "fp32", 6, 64)


def test_engines_are_laid_out_for_every_captured_batch_and_ratio(options: BuildOptions) -> None:
    manifest = read_manifest(build(changed(options, ratios=(1.0, 0.25))))
    assert manifest.ratios == (0.25, 1.0)
    assert manifest.captured_batches == (1, 2, 4, 6)
    assert manifest.token_buckets == (1, 2, 4, 6, 8, 16, 24)  # B and 4 B: a quarter of 4 B is B


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [TARGET, QWEN3])
def test_graphs_have_the_tensors_that_the_manifest_lists(
    tmp_path: Path, options: BuildOptions, precision: str, config: dict[str, Any]
) -> None:
    target = write_target(tmp_path / "other", config)
    out = build(changed(options, target=str(target), precision=precision))
    tensors = read_manifest(out).tensors
    for name in ("target", "drafter"):
        model = read_graph(out / f"{name}.xml")
        assert {port.get_any_name() for port in model.inputs} == set(tensors[name]["inputs"])
        assert [port.get_any_name() for port in model.outputs] == tensors[name]["outputs"]


def test_an_onnx_bundle(options: BuildOptions) -> None:
    import onnx  # noqa: PLC0415

    out = build(changed(options, backend="onnx"))
    manifest = read_manifest(out)
    verify_files(out, manifest)
    assert {"target.onnx", "drafter.onnx"} <= set(manifest.files)
    for name in ("target", "drafter"):
        graph = onnx.load(out / f"{name}.onnx", load_external_data=False).graph
        assert {value.name for value in graph.input} == set(manifest.tensors[name]["inputs"])
        assert {value.name for value in graph.output} == set(manifest.tensors[name]["outputs"])


def drafts(out: Path) -> int:
    return read_manifest(out).drafter.draft_vocab_size


def test_the_draft_vocabulary(tmp_path: Path, options: BuildOptions) -> None:
    (tmp_path / "ids.json").write_text("[7, 3, 5]")
    own = changed(options, drafter=str(write_drafter(tmp_path / "with-own", draft_vocab=[4, 5, 6, 7])))
    assert drafts(build(own)) == 4
    assert drafts(build(changed(own, draft_vocab="all"))) == 272
    assert drafts(build(changed(own, draft_vocab=272))) == 272
    assert drafts(build(changed(own, draft_vocab=10))) == 10  # EOS ids 0 and 2 are among them
    assert drafts(build(changed(own, draft_vocab=1))) == 2  # id 0, and EOS 2
    assert drafts(build(changed(own, draft_vocab=tmp_path / "ids.json"))) == 3
    assert drafts(build(changed(options, draft_vocab="own"))) == 272


def test_only_the_rows_of_the_draft_vocabulary_are_in_the_drafter(tmp_path: Path, options: BuildOptions) -> None:
    out = build(changed(options, draft_vocab=100))
    constants = {
        tuple(node.get_output_shape(0))
        for node in read_graph(out / "drafter.xml").get_ordered_ops()
        if node.get_type_name() == "Constant"
    }
    assert {(100, 32), (272, 32)} <= constants


# --- when it is built again


def test_the_same_inputs_find_the_bundle(tmp_path: Path, options: BuildOptions) -> None:
    assert wrote(options)
    before = {path: path.stat().st_mtime_ns for path in options.out.iterdir()}
    assert not wrote(options)
    assert not wrote(changed(options, ratios=(1.0, 0.75, 0.5, 0.25)))  # the same set
    assert {path: path.stat().st_mtime_ns for path in options.out.iterdir()} == before


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16"},
        {"backend": "onnx"},
        {"max_batch": 7},
        {"max_len": 65},
        {"ratios": (1.0,)},
        {"draft_vocab": 9},
    ],
)
def test_every_option_is_part_of_the_key(options: BuildOptions, fields: dict[str, Any]) -> None:
    key = read_manifest(build(options)).key
    assert wrote(changed(options, **fields))
    assert read_manifest(options.out).key != key
    assert wrote(options)
    assert read_manifest(options.out).key == key


def test_every_input_is_part_of_the_key(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {read_manifest(build(options)).key}
    path = Path(options.target) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    keys.add(read_manifest(build(options)).key)
    path = Path(options.drafter) / "config.json"
    path.write_text(json.dumps({**DRAFTER, "rms_norm_eps": 1e-6}))
    keys.add(read_manifest(build(options)).key)
    (Path(options.target) / "chat_template.jinja").write_text("other")
    keys.add(read_manifest(build(options)).key)
    assert (options.out / "chat_template.jinja").read_text() == "other"
    monkeypatch.setattr(bundle_module, "_code_sha256", lambda: "another emitter")
    keys.add(read_manifest(build(options)).key)
    assert len(keys) == 5


@pytest.mark.parametrize("damage", ["remove", "truncate", "flip", "manifest"])
def test_a_damaged_bundle_is_built_again(options: BuildOptions, damage: str) -> None:
    path = build(options) / "target.bin"
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "flip":
        data = bytearray(path.read_bytes())
        data[-1] ^= 0xFF
        path.write_bytes(data)
    else:
        raw = json.loads((options.out / "manifest.json").read_text())
        del raw["ratios"]
        (options.out / "manifest.json").write_text(json.dumps(raw))
    assert wrote(options)
    verify_files(options.out, read_manifest(options.out))


def test_a_cache_hit_does_not_hash_big_files_again(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def age(directory: Path) -> None:
        for path in directory.iterdir():
            os.utime(path, (time.time() - 60, time.time() - 60))

    age(Path(options.target))
    age(Path(options.drafter))
    build(options)
    age(options.out)
    build(options)
    monkeypatch.setattr("dcut_engines.digests.file_sha256", lambda path: pytest.fail(f"{path} is hashed again"))
    assert not wrote(options)


# --- what is refused


def test_an_unknown_model_is_refused(tmp_path: Path, options: BuildOptions) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UnknownModel, match=r"config\.json is missing"):
        build(changed(options, target=str(tmp_path / "nothing")))
    with pytest.raises(UnknownModel, match="no local path"):
        build(changed(options, drafter=str(tmp_path / "no-such")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_len": 129}, "--max-len 129: the model's context is 128"),
        ({"max_len": 3}, "--max-len 3: at least one block of 4"),
        ({"draft_vocab": 273}, "--draft-vocab 273: the vocabulary has 272 ids"),
    ],
)
def test_options_that_this_model_cannot_serve(options: BuildOptions, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        build(changed(options, **fields))
    assert str(caught.value) == message
    assert not options.out.exists()


def test_smollm2_bundle(smollm2_bundle_fp32: Path, smollm2_bundle_bf16: Path) -> None:
    for precision, out in (("fp32", smollm2_bundle_fp32), ("bf16", smollm2_bundle_bf16)):
        manifest: Manifest = read_manifest(out)
        verify_files(out, manifest)
        assert (manifest.precision, manifest.target.identity) == (precision, "smollm2-135m-instruct")
        assert (manifest.drafter.identity, manifest.drafter.draft_vocab_size) == ("smollm2-135m-dflash-b8", 8192)
        assert (manifest.tokenizer.bos_id, manifest.tokenizer.eos_ids) == (1, (2,))
