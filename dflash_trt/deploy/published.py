# SPDX-License-Identifier: Apache-2.0
"""Published facts of checkpoints, for planning a deployment before anything is downloaded.

A local checkpoint is read instead, where there is one.

Groups of caches: vLLM 0.33.0 divides layers into groups of as many as the rarest kind has
(v1/core/kv_cache_planning.py, `_get_kv_cache_groups_uniform_page_size`), and builds the metadata of each group in every
step. A draft with one full layer makes each layer a group. Where pages have several sizes, a layout whose outermost
dimension is the block packs layers of several sizes into a group (`_get_packed_kv_cache_groups`); where all have one
size, no layout brings fewer.

Parsers divide answers into reasoning, tool calls and text; without them a server returns raw text. Sources: SGLang
0.5.23's detectors (its wheel), vLLM's model recipes and TensorRT-LLM's tool_parser_factory.py; trtllm-serve reads
gpt-oss's Harmony format on its own. Dynamo's frontend has parsers of its own: ai-dynamo/dynamo, docs/fern/reasoning and
tool-calling at cdf9267d, names as in ai-dynamo 1.6.1.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.deploy.gpus import DATA
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.files.json_file import package_data


class PublishedDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Published facts of a draft checkpoint."""

    draft: str
    target: str
    spec: PartialDraftSpec
    """model_type comes from others' test fixtures, where given; config.json itself has not been seen."""
    size_gib: float | None = None
    """Size of the BF16 file, where published."""


class _PublishedFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    drafts: tuple[PublishedDraft, ...]
    moe_backends: dict[str, dict[str, str]]
    """TensorRT-LLM's expert kernels by target and the GPU's major compute capability, where its guides name one."""


class _Targets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: dict[str, str]
    """Source of each target's facts."""
    targets: tuple[TargetShape, ...]


@cache
def _published() -> _PublishedFacts:
    return package_data(DATA / "checkpoints.json", _PublishedFacts)


@cache
def published_drafts() -> dict[str, PublishedDraft]:
    """By repository id."""
    return {entry.draft: entry for entry in _published().drafts}


def moe_backend(target: str, compute_capability: tuple[int, int]) -> str | None:
    """TensorRT-LLM's expert kernels for a target on a GPU; None where its guides name none."""
    return _published().moe_backends.get(target, {}).get(str(compute_capability[0]))


@cache
def published_targets() -> dict[str, TargetShape]:
    """By repository id."""
    data = package_data(DATA / "targets.json", _Targets)
    return {shape.target: shape for shape in data.targets}


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


Owner = Runtime | Literal["dynamo"]


class Parsers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parser names of a family of targets, by runtime."""

    prefixes: tuple[str, ...] = ()
    """Beginnings of a family's repository ids; the owner does not count, since copies have others."""
    reasoning: dict[Owner, str] = {}
    tool: dict[Owner, str] = {}


@cache
def _known() -> tuple[Parsers, ...]:
    return package_data(DATA / "parsers.json", tuple[Parsers, ...])


def target_parsers(target: str) -> Parsers:
    """Parsers of a target by the family that its name shows, a repository's or a directory's; empty for others.

    config.json tells less than the name: Qwen3-Coder's chat template differs from Qwen3's, its model_type does not.
    """
    name = Path(target).name.lower()
    families = ((entry, tuple(Path(prefix).name.lower() for prefix in entry.prefixes)) for entry in _known())
    return next((entry for entry, beginnings in families if name.startswith(beginnings)), Parsers())


def missing_parsers(target: str, runtime: Runtime) -> str:
    """What to tell the user where a runtime would return reasoning and tool calls as plain text; empty where not."""
    parsers = target_parsers(target)
    if parsers.prefixes and (runtime in parsers.reasoning or runtime in parsers.tool or runtime == "trtllm"):
        return ""
    return (
        f"no parsers are known for {target} under {runtime}: reasoning and tool calls come as plain text; a copy of a"
        " known target needs its repository's name as the directory's"
    )
