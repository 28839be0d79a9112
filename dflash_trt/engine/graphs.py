# SPDX-License-Identifier: Apache-2.0
"""The two graphs as everybody outside sees them: file, inputs and outputs, each with its dtype and axes.

Axes: B blocks of the draft's own size S, T new context rows, rows of the page table (slots) and the pages of each.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec

COMPUTE, FLOAT, FP8, INT32, INT64 = "BFLOAT16", "FLOAT", "FLOAT8E4M3FN", "INT32", "INT64"  # ONNX's spelling
CONTEXT_LAYOUT_SIZE = 5  # page size, strides of page, K to V, row and head
PAGE_SIZES = (16, 32, 64)  # of a context in several pages
MAX_CONTEXT = 131072


class Port(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One input or output of a graph."""

    name: str
    dtype: str
    """ONNX spelling: BFLOAT16, INT32, ..."""
    shape: tuple[str | int, ...]
    """Strings are dynamic axes."""

    def sizes(self, axes: Mapping[str, int]) -> list[int]:
        """The shape where the dynamic axes have these sizes."""
        return [axes[size] if isinstance(size, str) else size for size in self.shape]


class Graph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ONNX file."""

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def graph_signatures(spec: PartialDraftSpec, *, fp8_cache: bool) -> dict[str, Graph]:
    """Both graphs of a draft, by name: what is written, planned, bound and called.

    context: target_hidden [T, A*H], positions [T] -> k, v [T, L, G, D].
    draft: noise_embeds [B, S, H], positions [B, S], context_pointers [L], context_layout [5],
    page_table [slots, pages], slot_ids [B], context_lengths [B] -> hidden [B, S, H], and with a head of the draft's own
    token_ids [B, K]: its proposals, by the target's ids; or, where candidates are scored, candidate_ids and
    candidate_logits [B, K, k].
    """
    L, G, D, H = spec.num_layers, spec.num_key_value_heads, spec.head_dim, spec.hidden_size
    S = spec.block_size
    cached = FP8 if fp8_cache else COMPUTE

    def port(name: str, dtype: str, *shape: str | int) -> Port:
        return Port(name=name, dtype=dtype, shape=shape)

    K, proposals = spec.num_draft_tokens, list[Port]()
    if spec.has_own_head and (k := spec.num_candidates) is not None:
        proposals = [port(f"candidate_{name}", dtype, "B", K, k) for name, dtype in (("ids", INT32), ("logits", FLOAT))]
    elif spec.has_own_head:
        proposals = [port("token_ids", INT32, "B", K)]
    context = Graph(
        file="context.onnx",
        inputs=(port("target_hidden", COMPUTE, "T", spec.target_hidden_size), port("positions", INT32, "T")),
        outputs=(port("k", cached, "T", L, G, D), port("v", cached, "T", L, G, D)),
    )
    draft = Graph(
        file="draft.onnx",
        inputs=(
            port("noise_embeds", COMPUTE, "B", S, H),
            port("positions", INT32, "B", S),
            port("context_pointers", INT64, L),
            port("context_layout", INT64, CONTEXT_LAYOUT_SIZE),
            port("page_table", INT32, "slots", "pages"),
            port("slot_ids", INT32, "B"),
            port("context_lengths", INT32, "B"),
        ),
        outputs=(port("hidden", COMPUTE, "B", S, H), *proposals),
    )
    return {"context": context, "draft": draft}
