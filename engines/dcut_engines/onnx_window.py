"""How packed rows, the attention window and the slots of the cache correspond; computed once per step, in the graph.

Request b's window is W consecutive slots from write_indices[b]. The graph fills all of it, though only the cells that
stand for one of the request's rows mean anything: the others repeat some other row. They are never seen, because a
query sees no slot past its own position, and the next window, which starts no later, overwrites them.

  packed row:       0    1    2    3        K = 4, W = 3, subsequence_begins = [0, 3, 4]
  row, depth:      0,0  0,1  0,2  1,0
  window cell:      0    1    2    3        cells 4 and 5 are garbage
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcut_engines.model_config import DrafterConfig
from dcut_engines.onnx_graph import OnnxGraph


@dataclass(frozen=True, slots=True)
class Window:
    """One step's correspondence.

    rows: i32 [B, W] the packed row that fills each cell.
    write_indices: i64 [B] the slot of each request's first cell.
    mask: bool [B, 1, queries, S_max] the slots each query may see.
    cells: i32 [K] the window cell of each packed query; None when queries are whole blocks already.
    """

    rows: str
    write_indices: str
    mask: str
    cells: str | None


@dataclass(frozen=True, slots=True)
class Requests:
    """The inputs that say where each request's rows and slots are, as both graphs read them.

    first, end: i32 [B, 1] its first packed row and one past its last. write_indices: i32 [B].
    offsets: i32 [W], 0 .. W - 1. slots: i32 [S_max], 0 .. S_max - 1.
    """

    first: str
    end: str
    write_indices: str
    offsets: str
    slots: str


def request_inputs(graph: OnnxGraph, begins_name: str, window: int | None, max_len: int) -> Requests:
    """Declare the inputs; a window of None becomes an input too."""
    begins = graph.input(begins_name, "i32", ["B_plus_1"])
    first = graph.node("Slice", [begins, graph.constant([0]), graph.constant([-1])])
    end = graph.node("Slice", [begins, graph.constant([1]), graph.constant([np.iinfo(np.int64).max])])
    write_indices = graph.input("write_indices", "i32", ["B"])
    offsets = graph.input("window_offsets", "i32", ["W"]) if window is None else graph.constant(range(window), np.int32)
    slots = graph.weight("slots", np.arange(max_len, dtype=np.int32))
    return Requests(_column(graph, first), _column(graph, end), write_indices, offsets, slots)


def target_window(graph: OnnxGraph, request_rows: str, depths: str, requests: Requests) -> Window:
    """The window of packed rows: row k is row depths[k] of request request_rows[k] (both i32 [K])."""
    last_row = graph.node("Sub", [_length(graph, request_rows), graph.constant(1, np.int32)])
    width = _length(graph, requests.offsets)
    own_slots = graph.node("Add", [_column(graph, requests.write_indices), requests.offsets])  # [B, W]
    return Window(
        rows=graph.node("Min", [graph.node("Add", [requests.first, requests.offsets]), last_row]),
        write_indices=graph.cast(requests.write_indices, "i64"),
        mask=_mask(graph, own_slots, requests),
        cells=graph.node("Add", [graph.node("Mul", [request_rows, width]), depths]),
    )


@dataclass(frozen=True, slots=True)
class Blocks:
    """The drafter's blocks, one per request: N = B * (D + 1) rows, request by request.

    ids, positions: i32 [N]. draft_rows: i32 [B * D], the block rows that draft.
    window: of the merged rows; its queries are the blocks.
    """

    ids: str
    positions: str
    draft_rows: str
    window: Window


def drafter_blocks(
    graph: OnnxGraph, config: DrafterConfig, anchors: str, context_positions: str, requests: Requests
) -> Blocks:
    """Every request's block behind its new context; merged rows are all context rows, then all block rows."""
    size = config.block_size
    context_count = graph.node("Sub", [requests.end, requests.first])  # [B, 1]
    anchor_slots = graph.node("Add", [_column(graph, requests.write_indices), context_count])  # [B, 1]
    anchor_rows = _anchor_rows(graph, anchors, size)  # [B, 1], among the block rows
    block_slots = graph.node("Add", [anchor_slots, graph.constant(range(size), np.int32)])  # [B, D + 1]

    visible = range(size) if config.causal else [size - 1] * size  # of the block, by each of its rows
    last_slots = graph.node("Add", [anchor_slots, graph.constant(visible, np.int32)])

    in_block = graph.node("Sub", [requests.offsets, context_count])  # [B, W], negative over the context
    in_block = graph.node("Min", [in_block, graph.constant(size - 1, np.int32)])
    block_rows = graph.node("Add", [graph.node("Add", [anchor_rows, in_block]), _length(graph, context_positions)])
    context_rows = graph.node("Add", [requests.first, requests.offsets])
    is_context = graph.node("Less", [requests.offsets, context_count])
    window = Window(
        rows=graph.node("Where", [is_context, context_rows, block_rows]),
        write_indices=graph.cast(requests.write_indices, "i64"),
        mask=_mask(graph, last_slots, requests),
        cells=None,
    )

    is_anchor = graph.constant([True] + [False] * (size - 1), np.bool_)
    ids = graph.node("Where", [is_anchor, _column(graph, anchors), graph.constant(config.mask_token_id, np.int32)])
    draft_rows = graph.node("Add", [anchor_rows, graph.constant(range(1, size), np.int32)])
    ids, positions, draft_rows = (
        graph.node("Reshape", [values, graph.constant([-1])]) for values in (ids, block_slots, draft_rows)
    )
    return Blocks(ids, positions, draft_rows, window)


def _column(graph: OnnxGraph, values: str) -> str:
    return graph.node("Unsqueeze", [values, graph.constant([1])])


def _length(graph: OnnxGraph, values: str) -> str:
    """Of a vector, i32 [1]."""
    return graph.cast(graph.node("Shape", [values]), "i32")


def _anchor_rows(graph: OnnxGraph, anchors: str, size: int) -> str:
    """0, D + 1, 2 * (D + 1), ..: i32 [B, 1]."""
    count = graph.node("Squeeze", [_length(graph, anchors), graph.constant([0])])
    indices = graph.node("Range", [graph.constant(0, np.int32), count, graph.constant(1, np.int32)])
    return _column(graph, graph.node("Mul", [indices, graph.constant(size, np.int32)]))


def _mask(graph: OnnxGraph, last_slots: str, requests: Requests) -> str:
    """Slots up to each query's last: last_slots i32 [B, queries] -> bool [B, 1, queries, S_max]."""
    last_slots = graph.node("Unsqueeze", [last_slots, graph.constant([1, 3])])
    return graph.node("LessOrEqual", [requests.slots, last_slots])
