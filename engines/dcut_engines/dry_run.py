"""dcut-trt build --dry-run: what a TensorRT build would compile and hold in memory, from config files alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Column, Table

from dcut_engines.build_options import PLAN_BACKENDS, BuildOptions, InvalidOption, check_against_target
from dcut_engines.drafter_checkpoint import DRAFT_VOCAB_FILE, dimension_pairs, read_draft_vocab, read_drafter_config
from dcut_engines.gguf_file import read_gguf
from dcut_engines.gguf_target import read_gguf_config
from dcut_engines.hf_config import read_decoder_config
from dcut_engines.model_config import DecoderConfig, DrafterConfig
from dcut_engines.sources import DRAFTERS
from dcut_engines.tensorrt_limits import check_compute_capability, check_networks
from dcut_engines.tensorrt_profiles import Layout, cache_slots, drafter_profiles, target_profiles
from dcut_engines.weights import Shape, check_heads, decoder_shapes, drafter_shapes
from dcut_trt.errors import DrafterMismatch, UnknownModel
from dcut_trt.manifest import ProfileSpec

ELEMENT_BYTES = 2  # fp16 and bf16
GIGABYTE = 1e9
# What TensorRT-RTX 1.7 adds to the weights: per profile, per profile and layer, and per profile with the pack node as
# its ONNX function. Plans of 2 to 30 layers came within a tenth of this, larger ones were not built.
PROFILE_BYTES, LAYER_BYTES, PACK_BYTES = 1.4e6, 0.47e6, 2.2e6
DIMENSIONS = ("K", "B", "W", "H", "S", "C")
# DFlash's own defaults, for a target whose drafter is not at hand.
DEFAULT_LAYERS, DEFAULT_BLOCK_SIZE = 5, 16


@dataclass(frozen=True, slots=True)
class NetworkEstimate:
    """Bytes of one network's plan, and of its KV cache per request."""

    profiles: tuple[ProfileSpec, ...]
    plan_bytes: float
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """A build that was not made. drafter_name: None when its shape is DFlash's default for this target."""

    options: BuildOptions
    target_name: str
    drafter_name: str | None
    block_size: int
    slots: int
    networks: dict[str, NetworkEstimate]

    @property
    def kv_bytes(self) -> int:
        """Of one request, in both caches."""
        return sum(network.kv_bytes for network in self.networks.values())

    @property
    def total_bytes(self) -> float:
        """Plans, and the caches of max_batch requests; without TensorRT's scratch memory."""
        return sum(network.plan_bytes for network in self.networks.values()) + self.options.max_batch * self.kv_bytes


def estimate(options: BuildOptions) -> Estimate:
    """Read the configs and refuse what the build would refuse of them; weights and TensorRT are not needed.

    Raises InvalidOption, UnknownModel, UnsupportedModel, UnsupportedOption or DrafterMismatch.
    """
    if not options.makes_plans:
        raise InvalidOption("--dry-run", options.backend, f"with --backend {' or '.join(PLAN_BACKENDS)}")
    if options.compute_capability is not None:
        check_compute_capability(options, options.compute_capability)
    target = _read_target(options.target)
    drafter = _default_drafter(target)
    if options.drafter:
        drafter = read_drafter_config(_directory("drafter", options.drafter))
        for field, of_drafter, of_target in dimension_pairs(drafter, target):
            if of_drafter != of_target:
                raise DrafterMismatch(
                    f"drafter {options.drafter} does not fit target {options.target}: "
                    f"{field} is {of_drafter} for the drafter, {of_target} for the target"
                )
    check_against_target(options, target, drafter.block_size)
    check_networks(options, target, drafter)
    layout = Layout(options.ratios, options.max_batch, drafter.block_size, options.longest_prefill)
    slots = cache_slots(options.max_len, drafter.block_size)
    shapes = [*drafter_shapes(drafter).values(), *_borrowed_shapes(options, target)]
    return Estimate(
        options=options,
        target_name=Path(options.target).name,
        drafter_name=Path(options.drafter).name if options.drafter else None,
        block_size=drafter.block_size,
        slots=slots,
        networks={
            "target": _network(target, target_profiles(layout), decoder_shapes(target).values(), slots, 0.0),
            "drafter": _network(drafter, drafter_profiles(layout), shapes, slots, PACK_BYTES),
        },
    )


def render(found: Estimate) -> Group:
    """Tables for a terminal."""
    options = found.options
    drafter = found.drafter_name or f"DFlash's default ({DEFAULT_LAYERS} layers)"
    sizes = _table("estimate", "memory")
    sizes.columns[1].justify = "right"
    for name, network in found.networks.items():
        sizes.add_row(f"{name} plan, {len(network.profiles)} profiles", _gigabytes(network.plan_bytes))
    for name, network in found.networks.items():
        sizes.add_row(f"{name} KV cache, per request of {found.slots} slots", _gigabytes(network.kv_bytes))
    sizes.add_row(f"KV caches, {options.max_batch} requests", _gigabytes(options.max_batch * found.kv_bytes))
    sizes.add_row("in all, without scratch memory", _gigabytes(found.total_bytes), style="bold")
    title = (
        f"{escape(found.target_name)} + {escape(drafter)}, blocks of {found.block_size}: "
        f"{options.backend} {options.precision}, {options.max_batch} requests of {options.max_len} tokens"
    )
    return Group(title, _profiles_table(found), sizes)


def _profiles_table(found: Estimate) -> Table:
    table = _table("plan", "profile", *DIMENSIONS)
    for name, network in found.networks.items():
        for profile in network.profiles:
            ranges = (profile.dims.get(dim) for dim in DIMENSIONS)
            table.add_row(name, profile.name, *("" if span is None else _span(span[0], span[2]) for span in ranges))
        table.add_section()
    return table


def _table(*columns: str) -> Table:
    return Table(*(Column(name, no_wrap=True) for name in columns), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _network(
    config: DecoderConfig | DrafterConfig,
    profiles: tuple[ProfileSpec, ...],
    shapes: Iterable[Shape],
    slots: int,
    tail_bytes: float,
) -> NetworkEstimate:
    weights = ELEMENT_BYTES * sum(math.prod(shape) for shape in shapes)
    kernels = len(profiles) * (PROFILE_BYTES + config.layers * LAYER_BYTES + tail_bytes)
    rotary = ELEMENT_BYTES * slots * config.head_dim
    kv_bytes = 2 * ELEMENT_BYTES * config.layers * config.kv_heads * config.head_dim * slots
    return NetworkEstimate(profiles, weights + kernels + rotary, kv_bytes)


def _borrowed_shapes(options: BuildOptions, target: DecoderConfig) -> list[Shape]:
    """The target's embedding, and the rows of its head that drafts come from; one table when they are the same."""
    embedding = (target.vocab_size, target.hidden_size)
    rows = target.vocab_size
    own = _directory("drafter", options.drafter) / DRAFT_VOCAB_FILE if options.drafter else None
    match options.draft_vocab:
        case "own" if own is not None and own.is_file():
            rows = len(read_draft_vocab(own, target.vocab_size))
        case int(count):
            rows = count
        case Path() as path:
            rows = len(read_draft_vocab(path.expanduser(), target.vocab_size))
    if rows == target.vocab_size and target.tie_word_embeddings:
        return [embedding]
    return [embedding, (rows, target.hidden_size)]


def _read_target(name: str) -> DecoderConfig:
    path = Path(name).expanduser()
    config = read_gguf_config(read_gguf(path)) if path.is_file() else read_decoder_config(_directory("target", name))
    check_heads(name, config)
    return config


def _directory(role: str, name: str) -> Path:
    for path in (Path(name).expanduser(), DRAFTERS / name):
        if name and path.is_dir():
            return path
    raise UnknownModel(f"{role} {name!r}: --dry-run reads the config.json of a local directory, and downloads nothing")


def _default_drafter(target: DecoderConfig) -> DrafterConfig:
    """DFlash's defaults: layers shaped as the target's, reading as many of them, evenly spread."""
    last = max(target.layers - 2, 0)
    reads = {1 + round(index * (last - 1) / (DEFAULT_LAYERS - 1)) for index in range(DEFAULT_LAYERS)}
    return DrafterConfig(
        layers=DEFAULT_LAYERS,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        attention_bias=target.attention_bias,
        block_size=DEFAULT_BLOCK_SIZE,
        mask_token_id=0,
        target_layer_ids=tuple(sorted(layer for layer in reads if 0 <= layer < target.layers)) or (0,),
        num_target_layers=target.layers,
        causal=False,
    )


def _span(smallest: int, largest: int) -> str:
    return str(largest) if smallest == largest else f"{smallest}..{largest}"


def _gigabytes(count: float) -> str:
    return f"{count / GIGABYTE:.2f} GB" if count >= GIGABYTE / 10 else f"{count / GIGABYTE * 1e3:.1f} MB"
