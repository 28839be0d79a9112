# SPDX-License-Identifier: Apache-2.0
"""Published facts of checkpoints, for planning a deployment before anything is downloaded.

They stand in only where no local checkpoint is given; a checkpoint that is there is read, and wins.
"""

from __future__ import annotations

from functools import cache

import msgspec

from dflash_trt.deploy.gpus import DATA


class PublishedDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a draft checkpoint from outside."""

    draft: str
    target: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    attention_bias: bool
    size_gib: float | None = None
    """Of the BF16 file, where it was published."""
    max_position_embeddings: int | None = None
    model_type: str | None = None
    """Of its config.json as others' test fixtures have it; the file itself has not been seen."""


class PublishedTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a mixture-of-experts target from outside."""

    target: str
    num_layers: int
    num_full_layers: int
    """Layers whose cache grows with the sequence; the others keep `sliding_window` tokens."""
    sliding_window: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int
    expert_intermediate_size: int
    expert_bits: float
    """Per expert weight, scales included."""
    moe_backend: dict[str, str]
    """TensorRT-LLM's expert kernels by the GPU's major compute capability, where its guides name one."""


class _Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    drafts: tuple[PublishedDraft, ...]
    targets: tuple[PublishedTarget, ...]


@cache
def _published() -> _Published:
    return msgspec.json.decode((DATA / "checkpoints.json").read_bytes(), type=_Published)


@cache
def published_drafts() -> dict[str, PublishedDraft]:
    """By repository id."""
    return {entry.draft: entry for entry in _published().drafts}


@cache
def published_targets() -> dict[str, PublishedTarget]:
    """By repository id."""
    return {entry.target: entry for entry in _published().targets}
