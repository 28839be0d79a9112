# SPDX-License-Identifier: Apache-2.0
"""Rows of the draft graph, filled up to what TensorRT reads NVFP4 in.

The scales of an NVFP4 activation are read in tiles of 128 rows. Where the rows are as many, one kernel quantises and
arranges them; else each GEMM costs two. So they are padded once, in front, and left out again at the end. The rows do
not see each other, and attention reads and writes only those of the block: what stands in the others does not matter.
"""

from __future__ import annotations

import onnx

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.quantization import NVFP4
from dflash_trt.engine.graph.onnx_builder import GraphBuilder, prune

TILE_ROWS = 128
PADDED, UNPADDED = "padded_rows", "unpadded_rows"


def is_padded(draft: DraftCheckpoint) -> bool:
    """Whether layers take NVFP4 activations, and none looks at the rows of a block together."""
    modules = draft.quantization.modules.items()
    return draft.spec.block_conv is None and any(m.startswith("layers.") and a == NVFP4 for m, a in modules)


def pad_rows(g: GraphBuilder, x: str) -> tuple[str, str]:
    """x [R, H] with rows of zeros up to a multiple of TILE_ROWS, and R, an INT64 [1]."""
    with g.scope(PADDED):
        rows = g.op("Gather", g.op("Shape", x), g.constant([0]), axis=0)
        tiles = g.op("Div", g.op("Add", rows, g.constant([TILE_ROWS - 1])), g.constant([TILE_ROWS]))
        more = g.op("Sub", g.op("Mul", tiles, g.constant([TILE_ROWS])), rows)
        pads = g.op("Concat", g.constant([0, 0]), more, g.constant([0]), axis=0)
    return g.named("Pad", x, pads, name=PADDED), rows


def unpad_rows(g: GraphBuilder, x: str, rows: str) -> str:
    """The first `rows` rows of x."""
    with g.scope(UNPADDED):
        bounds = g.constant([0]), rows, g.constant([0])
    return g.named("Slice", x, *bounds, name=UNPADDED)


def leave_out_padding(graph: onnx.GraphProto) -> None:
    """Takes the padding out of a graph, for what computes each row that it is given."""
    padded = {node.output[0]: node.input[0] for node in graph.node if node.name in (PADDED, UNPADDED)}
    if not padded:
        return
    for node in graph.node:
        node.input[:] = [padded.get(name, name) for name in node.input]
    prune(graph)
