"""The plugin as TensorRT sees it: the shapes of its outputs, and a kernel that is compiled into the plan.

A plan built with it needs neither Python nor this package to run. TensorRT reads the annotations below as objects, so
they must not become strings: no `from __future__ import annotations` here. It also wants every parameter by name.
"""
# ruff: noqa: ARG001, PLR0913, PLR0917

import tensorrt as trt
import tensorrt.plugin as trtp

from dcut_plugins.confidence_topk_pack.compile import KERNEL, THREADS
from dcut_plugins.confidence_topk_pack.contract import DOMAIN, OUTPUTS, PLUGIN_ID, check_limits

Outputs = tuple[  # TensorRT counts them here
    trtp.TensorDesc,
    trtp.TensorDesc,
    trtp.TensorDesc,
    trtp.TensorDesc,
    trtp.TensorDesc,
    trtp.TensorDesc,
    trtp.TensorDesc,
]


def register(ptx: bytes) -> None:
    """Let TensorRT's ONNX parser take the node as the plugin, in this process and from now on.

    ptx: from compile.build_kernel, for the device that plans are built for; a later call replaces it.
    """

    def implement(
        tokens: trtp.TensorDesc,
        confidence: trtp.TensorDesc,
        anchors: trtp.TensorDesc,
        anchor_positions: trtp.TensorDesc,
        budgets: trtp.TensorDesc,
        cost_ms: trtp.TensorDesc,
        bypass: trtp.TensorDesc,
        outputs: Outputs,
        tactic: int,
    ) -> tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        check_limits(_largest(tokens, 0), _largest(tokens, 1), _largest(budgets, 0))
        launch = trtp.KernelLaunchParams(block_x=THREADS)
        batch, length = tokens.shape_expr
        (ratios,) = budgets.shape_expr
        sizes = trtp.SymIntExprs.from_tuple(tuple(trtp.SymInt32(size) for size in (batch, length, ratios)))
        return KERNEL, ptx, launch, sizes

    # Not lazily: the parser looks into the registry alone, and inlines the node's function when it finds nothing there.
    if not hasattr(trtp.op, DOMAIN):
        trtp.register(PLUGIN_ID, lazy_register=False)(_describe)
    trtp.aot_impl(PLUGIN_ID)(implement)


def _describe(
    tokens: trtp.TensorDesc,
    confidence: trtp.TensorDesc,
    anchors: trtp.TensorDesc,
    anchor_positions: trtp.TensorDesc,
    budgets: trtp.TensorDesc,
    cost_ms: trtp.TensorDesc,
    bypass: trtp.TensorDesc,
) -> Outputs:
    batch, length = tokens.shape_expr
    rows = batch * (length + 1)
    shapes = {"bucket": 1, "keep": batch, "subsequence_begins": batch + 1}
    return tuple(trtp.from_shape_expr((shapes.get(name, rows),), dtype=trt.int32) for name in OUTPUTS)


def _largest(tensor: trtp.TensorDesc, axis: int) -> int:
    """The largest extent that the plan's profiles allow."""
    shape = tensor.shape
    return int(shape.max[axis] if shape.is_dynamic else shape[axis])
