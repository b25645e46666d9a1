"""What TensorRT does not compile, refused before any work is done; and which GPU plans are compiled for."""

from __future__ import annotations

import ctypes

from dcut_engines.build_options import BuildOptions, InvalidOption
from dcut_engines.model_config import DecoderConfig, DrafterConfig
from dcut_plugins.confidence_topk_pack.contract import check_limits
from dcut_trt.errors import UnsupportedModel

# Of its fused attention kernels; TensorRT decomposes no attention of ours.
SMALLEST_HEAD, LARGEST_HEAD, HEAD_STEP = 16, 256, 8
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}, cuda.h
FLAG = "--compute-capability"


def local_compute_capability() -> str | None:
    """Of the first GPU, such as "9.0"; None where there is no driver or no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    values = [ctypes.c_int(), ctypes.c_int()]
    for value, attribute in zip(values, (MAJOR, MINOR), strict=True):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
    return f"{values[0].value}.{values[1].value}"


def choose_compute_capability(options: BuildOptions, local: str | None) -> str:
    """What the plans of this build are for. Raises InvalidOption where this machine cannot compile for that.

    tensorrt compiles on the GPU that it compiles for; tensorrt-rtx for any that it supports, with no GPU at hand.
    """
    wanted = options.compute_capability
    if options.backend == "tensorrt":
        if local is None:
            raise InvalidOption("--backend", options.backend, "it compiles on the GPU it compiles for; none is here")
        if wanted not in (None, local):
            raise InvalidOption(FLAG, wanted, f"tensorrt compiles for the local GPU, which has {local}")
    chosen = wanted or local
    if chosen is None:
        supported = ", ".join(RTX_CAPABILITIES)
        raise InvalidOption(FLAG, "(none)", f"there is no GPU here to take it from; name one of {supported}")
    check_compute_capability(options, chosen)
    return chosen


def check_compute_capability(options: BuildOptions, capability: str) -> None:
    """Raise InvalidOption for a GPU that the backend does not compile for, or that lacks the precision."""
    if options.backend == "tensorrt-rtx" and capability not in RTX_CAPABILITIES:
        supported = ", ".join(RTX_CAPABILITIES)
        raise InvalidOption(FLAG, capability, f"tensorrt-rtx supports {supported}; for others: --backend tensorrt")
    if options.precision == "bf16" and float(capability) < 8.0:
        raise InvalidOption("--precision", "bf16", f"compute capability {capability} has no bf16; 8.0 and newer do")


def check_networks(options: BuildOptions, target: DecoderConfig, drafter: DrafterConfig) -> None:
    """Raise UnsupportedModel for heads that no fused attention has, UnsupportedOption for what the pack node lacks."""
    for name, config in (("target", target), ("drafter", drafter)):
        if not SMALLEST_HEAD <= config.head_dim <= LARGEST_HEAD or config.head_dim % HEAD_STEP:
            raise UnsupportedModel(
                f"{name}: head_dim={config.head_dim}: TensorRT's attention needs a multiple of {HEAD_STEP} "
                f"from {SMALLEST_HEAD} to {LARGEST_HEAD}"
            )
    check_limits(options.max_batch, drafter.draft_length, len(options.ratios))
