# SPDX-License-Identifier: Apache-2.0
"""Published facts of checkpoints, for planning a deployment before anything is downloaded.

A local checkpoint is read instead, where there is one.
"""

from __future__ import annotations

from functools import cache

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.target_cache import TargetCache
from dflash_trt.checkpoint.target_checkpoint import PartialTargetSpec
from dflash_trt.deploy.gpus import DATA
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json


class PublishedDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Published facts of a draft checkpoint."""

    draft: str
    target: str
    spec: PartialDraftSpec
    """model_type comes from others' test fixtures, where given; config.json itself has not been seen."""
    size_gib: float | None = None
    """Size of the BF16 file, where published."""


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The experts of a mixture-of-experts target; each has gate, up and down."""

    num_experts: int
    """Number of experts in each layer."""
    intermediate_size: int
    bits: float
    """Per weight, scales included."""


class PublishedTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Published facts of a mixture-of-experts target."""

    target: str
    spec: PartialTargetSpec
    cache: TargetCache
    num_attention_heads: int
    experts: Experts
    moe_backend: dict[str, str]
    """TensorRT-LLM's expert kernels by the GPU's major compute capability, where its guides name one."""


class _PublishedFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    drafts: tuple[PublishedDraft, ...]
    targets: tuple[PublishedTarget, ...]


@cache
def _published() -> _PublishedFacts:
    return read_json(DATA / "checkpoints.json", _PublishedFacts, ConfigError, what="the package's data")


@cache
def published_drafts() -> dict[str, PublishedDraft]:
    """By repository id."""
    return {entry.draft: entry for entry in _published().drafts}


@cache
def published_targets() -> dict[str, PublishedTarget]:
    """By repository id."""
    return {entry.target: entry for entry in _published().targets}
