# SPDX-License-Identifier: Apache-2.0
"""Published facts of checkpoints, for planning a deployment before anything is downloaded.

A local checkpoint is read instead, where there is one.
"""

from __future__ import annotations

from functools import cache

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.deploy.gpus import DATA
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
