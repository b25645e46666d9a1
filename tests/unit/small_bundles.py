"""A built bundle again, for fewer requests at once: a server on a busy machine is warm sooner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dcut_trt.manifest import MANIFEST_NAME, read_manifest
from dcut_trt.spec.packing import token_buckets


def small_bundle(bundle: Path, out: Path, max_batch: int) -> Path:
    """The same engines in a bundle of its own at `out`."""
    manifest = read_manifest(bundle)
    batches = tuple(batch for batch in manifest.captured_batches if batch <= max_batch)
    buckets = token_buckets(manifest.ratios, batches, manifest.draft_length + 1)
    small = replace(manifest, captured_batches=batches, token_buckets=buckets, max_batch=max_batch)
    out.mkdir()
    for name in manifest.files:
        (out / name).symlink_to(bundle / name)
    (out / MANIFEST_NAME).write_text(small.to_json(), encoding="utf-8")
    return out
