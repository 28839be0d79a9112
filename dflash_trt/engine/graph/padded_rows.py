# SPDX-License-Identifier: Apache-2.0
"""Rows of the draft graph, filled up to what TensorRT reads NVFP4 in.

The scales of an NVFP4 activation are read in tiles of 128 rows. Where the rows are as many, one kernel quantises and
arranges them; else each GEMM costs two. So they are padded once, in front, and left out again at the end. The rows do
not see each other, or only within a block, and attention reads and writes only those of the block: what stands in the
others does not matter. Ranks that share a drafter pad theirs alike, and add up the block's alone.
"""

from __future__ import annotations

import onnx

from dflash_trt.engine.graph.onnx_builder import GraphBuilder, prune
from dflash_trt.engine.signatures import TILE_ROWS

SCOPE = "padding"


def pad_rows(g: GraphBuilder, x: str) -> tuple[str, str]:
    """x [R, H] with rows of zeros up to a multiple of TILE_ROWS, and R, an INT64 [1]."""
    with g.scope(SCOPE):
        rows = g.op("Gather", g.op("Shape", x), g.constant([0]), axis=0)
        tiles = g.op("Div", g.op("Add", rows, g.constant([TILE_ROWS - 1])), g.constant([TILE_ROWS]))
        more = g.op("Sub", g.op("Mul", tiles, g.constant([TILE_ROWS])), rows)
        return g.op("Pad", x, g.op("Concat", g.constant([0, 0]), more, g.constant([0]), axis=0)), rows


def unpad_rows(g: GraphBuilder, x: str, rows: str) -> str:
    """The first `rows` rows of x."""
    with g.scope(SCOPE):
        return g.op("Slice", x, g.constant([0]), rows, g.constant([0]))


def leave_out_padding(graph: onnx.GraphProto) -> None:
    """Takes the padding out of a graph, for what computes each row that it is given."""
    for node in graph.node:
        if node.op_type in ("Pad", "Slice") and node.name.startswith(f"{SCOPE}/"):
            node.op_type = "Identity"
            del node.input[1:]
    prune(graph)
