"""The composition root: the one place that names concrete backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dcut_trt.backends.base import Drafter, Target
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.errors import EngineMismatch
from dcut_trt.manifest import Manifest, read_manifest, verify_files
from dcut_trt.spec.cost_table import COST_TABLE_NAME
from dcut_trt.spec.policies import check_policy_name, make_policy
from dcut_trt.spec.profiler import adopt_cost_table, machine_fingerprint, obtain_cost_table
from dcut_trt.tokenizer import Tokenizer


def open_engine(
    bundle: Path, options: EngineOptions, progress: Callable[[str, int, int], None] = lambda stage, done, total: None
) -> Engine:
    """Check, load, profile and warm a bundle; the engine can serve when this returns.

    progress is called with a stage name ("check", "load", "profile"), steps done and steps in all.
    Raises BundleError, EngineMismatch, CostTableError or UnsupportedOption.
    """

    def profiled(done: int, total: int) -> None:
        progress("profile", done, total)

    check_policy_name(options.policy)
    progress("check", 0, 1)
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    progress("load", 0, 1)
    tokenizer = Tokenizer.load(bundle, manifest.tokenizer)
    target, drafter, runtime = load_networks(bundle, manifest, options)
    # The profiler must draft; the policy that serves is set when the table is there.
    engine = Engine(
        target,
        drafter,
        tokenizer,
        make_policy("dflash", None),
        max_queue=options.max_queue,
        prefill_chunk=options.prefill_chunk,
        busy_prefill_chunk=options.busy_prefill_chunk,
        prefix_cache=options.prefix_cache,
    )
    fingerprint = machine_fingerprint(manifest.key, runtime, options.threads)
    if options.cost_table is None:
        path = bundle / COST_TABLE_NAME
        table = obtain_cost_table(
            engine, manifest.ratios, fingerprint, path, measure=options.profile, progress=profiled
        )
    else:
        table = adopt_cost_table(engine, options.cost_table, fingerprint, profiled)
    engine.policy = make_policy(options.policy, table, engine.limits.traits)
    engine.cost_table = table
    return engine


def load_networks(bundle: Path, manifest: Manifest, options: EngineOptions) -> tuple[Target, Drafter, str]:
    """Both networks on the runtime that the bundle was built for, and what identifies it. Imports no other runtime."""
    match manifest.backend:
        case "openvino":
            from dcut_trt.backends.openvino import load_openvino, runtime_version  # noqa: PLC0415

            return *load_openvino(bundle, manifest, options), runtime_version()
        case "tensorrt" | "tensorrt-rtx":
            from dcut_trt.backends.tensorrt import load_tensorrt, open_tensorrt  # noqa: PLC0415

            runtime = open_tensorrt(manifest.backend)
            return *load_tensorrt(bundle, manifest, options, runtime), runtime.description
        case _:
            raise EngineMismatch(
                f"{bundle} was built with --backend {manifest.backend}, which is an exchange format for engine "
                "builders. To serve, rebuild it: dcut-trt build --backend openvino, tensorrt or tensorrt-rtx"
            )
