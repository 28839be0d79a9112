# SPDX-License-Identifier: Apache-2.0
"""Signatures of the graphs: file, inputs and outputs, each with its dtype and axes.

Axes: B blocks of the draft's own size S, T new context rows, rows of the page table (slots) and the pages of each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.number_formats import NVFP4
from dflash_trt.checkpoint.quantization import Quantization

COMPUTE, FLOAT, FP8, INT32, INT64 = "BFLOAT16", "FLOAT", "FLOAT8E4M3FN", "INT32", "INT64"  # ONNX's spelling
CONTEXT_LAYOUT_SIZE = 6  # page size; strides of page, K to V, row and head; number of pages
CONTEXT_POINTER_SIZE = 2  # address, checksum
CONTEXT_HIDDEN = "context_hidden"
CORRELATOR = "correlator"
PAGE_SIZES = (16, 32, 64)  # rows of a page, where a context has several
TOKENS_PER_PAGE = 32  # in the caches of target and drafter; the default of tokens_per_block in TensorRT-LLM
MAX_CONTEXT = 131072
TILE_ROWS = 128  # in which TensorRT reads the scales of NVFP4 activations
ROWS = re.compile(r"((?P<tile>\d+)\*ceil\()?(?P<block>\d+)\*(?P<axis>\w+)(/\d+\))?")


def num_pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // TOKENS_PER_PAGE)


class Port(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One input or output of a graph."""

    name: str
    dtype: str
    """ONNX spelling: BFLOAT16, INT32, ..."""
    shape: tuple[str | int, ...]
    """Sizes; strings are dynamic axes, or `rows_axis`."""

    def sizes(self, axes: Mapping[str, int]) -> list[int]:
        """The shape where the dynamic axes have these sizes."""
        return [_size(size, axes) if isinstance(size, str) else size for size in self.shape]


def _size(axis: str, axes: Mapping[str, int]) -> int:
    if (rows := ROWS.fullmatch(axis)) is None:
        return axes[axis]
    tile = int(rows["tile"] or 1)
    return -(-int(rows["block"]) * axes[rows["axis"]] // tile) * tile


def rows_axis(block_size: int, *, padded: bool) -> str:
    """How a shape says the rows of B blocks, filled up to a multiple of TILE_ROWS where they are padded."""
    rows = f"{block_size}*B"
    return f"{TILE_ROWS}*ceil({rows}/{TILE_ROWS})" if padded else rows


def fits_tiles(spec: PartialDraftSpec) -> bool:
    """Whether rows of padding change nothing: none looks at others, or blocks of them are whole."""
    return spec.block_conv is None or TILE_ROWS % spec.block_size == 0


def is_padded(spec: PartialDraftSpec, quantization: Quantization) -> bool:
    """Whether the draft graph fills its rows up to a multiple of TILE_ROWS: some layers take NVFP4 activations."""
    modules = quantization.modules.items()
    return fits_tiles(spec) and any(m.startswith("layers.") and a == NVFP4 for m, a in modules)


class Graph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ONNX file."""

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def reads_context(self) -> bool:
        """Whether it has attention nodes, which are the plugin's."""
        return any(port.name == "page_table" for port in self.inputs)


def segment_name(index: int) -> str:
    """Name of a segment of a shard's draft graph, which is cut at every all-reduce."""
    return f"draft.{index}"


def num_segments(num_layers: int) -> int:
    """2 L + 1: attention and MLP of each layer end in an all-reduce, and the final norm is left."""
    return 2 * num_layers + 1


def graph_signatures(spec: PartialDraftSpec, quantization: Quantization, *, is_shard: bool = False) -> dict[str, Graph]:
    """The graphs of a draft, by name: what is written, planned, bound and called.

    context: target_hidden [T, A*H], positions [T] -> kv [T, 2, L, G, D], K before V; and in a LiLiCorr draft
    context_hidden [T, H], from which K and V are projected: it scores candidates by the last of these rows.
    draft: noise_embeds [B, S, H], positions [B, S], context_pointers [L, 2], context_layout [6],
    page_table [slots, pages], slot_ids [B], context_lengths [B] -> hidden [B, S, H], and with a head of the draft's own
    token_ids [B, K]: its proposals, by the target's ids; or, where candidates are scored, candidate_ids and
    candidate_logits [B, K, k].
    draft.0, draft.1, ... in the place of draft where `spec` is that of a shard (`_segments`).
    correlator: of a LiLiCorr draft alone (`_correlator`).
    """
    L, G, D, H = spec.num_layers, spec.num_key_value_heads, spec.head_dim, spec.hidden_size
    S = spec.block_size
    cached = FP8 if quantization.fp8_kv_cache else COMPUTE

    def port(name: str, dtype: str, *shape: str | int) -> Port:
        return Port(name=name, dtype=dtype, shape=shape)

    K, proposals = spec.num_draft_tokens, list[Port]()
    if spec.has_own_head and (k := spec.num_candidates) is not None:
        proposals = [port(f"candidate_{name}", dtype, "B", K, k) for name, dtype in (("ids", INT64), ("logits", FLOAT))]
    elif spec.has_own_head:
        proposals = [port("token_ids", INT32, "B", K)]
    last_rows = [] if spec.lilicorr is None else [port(CONTEXT_HIDDEN, COMPUTE, "T", H)]
    context = Graph(
        file="context.onnx",
        inputs=(port("target_hidden", COMPUTE, "T", spec.target_hidden_size), port("positions", INT32, "T")),
        outputs=(port("kv", cached, "T", 2, L, G, D), *last_rows),
    )
    block = (port("noise_embeds", COMPUTE, "B", S, H), port("positions", INT32, "B", S))
    cache = (
        port("context_pointers", INT64, L, CONTEXT_POINTER_SIZE),
        port("context_layout", INT64, CONTEXT_LAYOUT_SIZE),
        port("page_table", INT32, "slots", "pages"),
        port("slot_ids", INT32, "B"),
        port("context_lengths", INT32, "B"),
    )
    if is_shard:
        rows = rows_axis(S, padded=is_padded(spec, quantization))
        return {"context": context} | _segments(spec, block, cache, port("hidden", COMPUTE, rows, H))
    hidden = port("hidden", COMPUTE, "B", S, H)
    draft = Graph(file="draft.onnx", inputs=(*block, *cache), outputs=(hidden, *proposals))
    graphs = {"context": context, "draft": draft}
    return graphs if spec.lilicorr is None else graphs | {CORRELATOR: _correlator(spec, spec.lilicorr.top_k)}


def _correlator(spec: PartialDraftSpec, k: int) -> Graph:
    """candidate_embeds [B, K, k, H], candidate_log_probs [B, K, k], slot_hidden [B, K, H], anchor_hidden [B, H],
    num_slots [1] -> candidate_scores [B, K, k, k].
    """
    K, H = spec.num_draft_tokens, spec.hidden_size
    ports = (
        ("candidate_embeds", COMPUTE, ("B", K, k, H)),
        ("candidate_log_probs", FLOAT, ("B", K, k)),
        ("slot_hidden", COMPUTE, ("B", K, H)),
        ("anchor_hidden", COMPUTE, ("B", H)),
        ("num_slots", INT32, (1,)),
        ("candidate_scores", FLOAT, ("B", K, k, k)),
    )
    *inputs, scores = (Port(name=name, dtype=dtype, shape=shape) for name, dtype, shape in ports)
    return Graph(file=f"{CORRELATOR}.onnx", inputs=tuple(inputs), outputs=(scores,))


def _segments(
    spec: PartialDraftSpec, block: tuple[Port, ...], cache: tuple[Port, ...], hidden: Port
) -> dict[str, Graph]:
    """Segment i reads residual.i and partial.i [rows, H], the latter summed over ranks, and writes those of i + 1.

    The first takes the block and computes rope [B, S, D]; even ones read rope and the context. The last returns
    `hidden` [rows, H]. Rows are those of the GEMMs, padding included: any reshaping here would cost a kernel.
    """
    rope = Port(name="rope", dtype=FLOAT, shape=("B", spec.block_size, spec.head_dim))
    segments, last = dict[str, Graph](), num_segments(spec.num_layers) - 1
    for i in range(last + 1):
        before, after = (
            tuple(msgspec.structs.replace(hidden, name=name) for name in stream_names(at)) for at in (i, i + 1)
        )
        inputs, outputs = before, after
        if i == 0:
            inputs, outputs = (*block, *cache), (*after, rope)
        elif i == last:
            outputs = (hidden,)
        elif i % 2 == 0:
            inputs = (*before, rope, *cache)
        name = segment_name(i)
        segments[name] = Graph(file=f"{name}.onnx", inputs=inputs, outputs=outputs)
    return segments


def stream_names(segment: int) -> tuple[str, str]:
    """Inputs of a segment: the residual stream, and the sum over all ranks."""
    return f"residual.{segment}", f"partial.{segment}"
