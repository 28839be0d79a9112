# SPDX-License-Identifier: Apache-2.0
"""Groups of KV caches that vLLM makes of targets and drafts with several kinds of layers.

vLLM 0.33.0 divides layers into groups as large as its rarest kind (v1/core/kv_cache_planning.py,
`_get_kv_cache_groups_uniform_page_size`), and builds the metadata of each group in every step. A draft with one full
layer makes each layer a group. If pages have several sizes, a layout whose outermost dimension is the block packs
layers of several sizes into a group (`_get_packed_kv_cache_groups`); if all have one size, no layout brings fewer.
"""

from __future__ import annotations

from functools import cache

import msgspec

from dflash_trt.deploy.gpus import DATA
from dflash_trt.deploy.published import published_drafts
from dflash_trt.files.json_file import package_data

LAYOUT = "BLHNC"
"""Block-outermost, and among those that FlashAttention, Triton's kernels and FlashInfer's on SM 10.x all take."""


class AttentionLayers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers of one kind that keep K and V."""

    layers: int
    heads: int
    """KV heads."""
    head_dim: int

    def row(self, ranks: int) -> int:
        """Numbers of K that a token takes on one of `ranks` ranks."""
        return max(1, self.heads // ranks) * self.head_dim


class HybridCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kinds of layers of a target and of its drafts."""

    drafts: tuple[str, ...]
    """Repository ids."""
    full: AttentionLayers
    sliding: AttentionLayers | None = None
    linear_layers: int = 0
    """Layers with a recurrent state, whose pages vLLM makes as large as those of the full layers."""
    draft_sliding_layers: int
    draft_full_layers: int

    @property
    def layers(self) -> int:
        """All layers, target's and draft's."""
        target = self.full.layers + self.linear_layers + (self.sliding.layers if self.sliding else 0)
        return target + self.draft_sliding_layers + self.draft_full_layers

    def of_draft(self, draft: str) -> AttentionLayers:
        """The full layers of a draft."""
        spec = published_drafts()[draft].spec
        return AttentionLayers(layers=self.draft_full_layers, heads=spec.num_key_value_heads, head_dim=spec.head_dim)


class _HybridCaches(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    caches: tuple[HybridCache, ...]


@cache
def hybrid_caches() -> dict[str, HybridCache]:
    """By repository id of the draft, those whose target and draft have several kinds of layers."""
    read = package_data(DATA / "hybrid_caches.json", _HybridCaches)
    return {draft: entry for entry in read.caches for draft in entry.drafts}


def vllm_cache_layout(draft: str | None, ranks: int) -> str | None:
    """The layout that brings fewer groups than layers with `draft` on `ranks` tensor-parallel ranks.

    None where no layout does, and for drafts whose layers are not known.
    """
    found = hybrid_caches().get(draft or "")
    if found is None:
        return None
    kinds = [found.full, found.of_draft(draft or ""), *([found.sliding] if found.sliding else [])]
    return LAYOUT if len({kind.row(ranks) for kind in kinds}) > 1 else None
