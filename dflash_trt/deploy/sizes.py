# SPDX-License-Identifier: Apache-2.0
"""Specs of a deployment's two models, and how weights and caches divide among ranks."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import msgspec

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.draft_spec import HEAD, PartialDraftSpec
from dflash_trt.checkpoint.draft_tensors import added_shapes, linear_shapes
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.number_formats import FORMATS
from dflash_trt.checkpoint.source import GGUF, REPOSITORY_ID, configuration_directory
from dflash_trt.checkpoint.target_cache import TargetCache, read_target_cache
from dflash_trt.checkpoint.target_checkpoint import (
    PartialTargetSpec,
    TargetCheckpoint,
    num_mtp_layers,
    read_target,
    read_target_spec,
)
from dflash_trt.checkpoint.weights import has_weights
from dflash_trt.deploy.published import published_drafts, published_targets
from dflash_trt.deploy.read_target_shape import shape_of
from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.files.read import is_directory, is_file

CHECKPOINT, PUBLISHED = "checkpoint", "published facts"
BF16_BITS = 16.0
WEIGHT_BITS = {name: each.plan_bits for name, each in FORMATS.items()}
# Every rank keeps these whole; the projections of the layers are divided among tensor-parallel ranks.
REPLICATED = ("fc",)


class DraftSizes(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A draft, read or published."""

    name: str
    spec: PartialDraftSpec
    checkpoint: DraftCheckpoint | None = None
    """Checkpoint that `spec` was read from; None for a published draft."""

    @property
    def origin(self) -> str:
        """CHECKPOINT or PUBLISHED."""
        return PUBLISHED if self.checkpoint is None else CHECKPOINT

    @property
    def quantized(self) -> dict[str, str]:
        """Algorithm by module of the checkpoint as it is."""
        return {} if self.checkpoint is None else self.checkpoint.quantization.modules

    @property
    def architectures(self) -> tuple[str, ...]:
        """`architectures` of config.json; empty for a published draft."""
        return () if self.checkpoint is None else self.checkpoint.config.texts("architectures")

    @cached_property
    def _weights(self) -> tuple[dict[str, int], int]:
        """Weights by linear module, and what DFlash2, DSpark and LiLiCorr add."""
        linear = {module: math.prod(shape) for module, shape in linear_shapes(self.spec).items()}
        return linear, sum(map(math.prod, added_shapes(self.spec).values()))

    def weight_bytes(self, algorithms: dict[str, str], ranks: int) -> int:
        """Bytes on one of `ranks` tensor-parallel ranks; norms and biases are not counted."""
        spec = self.spec
        vocabulary = (spec.vocab_size or 0) * spec.own_embedding * BF16_BITS
        vocabulary += (spec.draft_vocab_size or 0) * WEIGHT_BITS.get(algorithms.get(HEAD, ""), BF16_BITS)
        total = vocabulary * spec.hidden_size / 8 / ranks
        linear, added = self._weights
        total += added * BF16_BITS / 8  # whole on every rank
        for module, count in linear.items():
            bits = WEIGHT_BITS.get(algorithms.get(module, ""), BF16_BITS)
            total += count * bits / 8 / (1 if module in REPLICATED else ranks)
        return round(total)


class TargetSizes(msgspec.Struct, frozen=True, kw_only=True):
    """A target, read or published."""

    name: str
    spec: PartialTargetSpec
    cache: TargetCache | None
    """None where the size of its layers' caches is not known."""
    expert_bytes: int
    """Weights of the experts, all ranks together."""
    dense_bytes: int
    """Weights of everything but experts: attention, dense MLPs, embedding and lm_head."""
    num_attention_heads: int | None
    """Query heads; None if its configuration lacks them."""
    num_mtp_layers: int | None = None
    """Multi-token-prediction layers; None where it is not known whether there are any."""
    checkpoint: TargetCheckpoint | None = None
    """Checkpoint that the rest was read from; None for a published target."""

    @property
    def origin(self) -> str:
        """CHECKPOINT or PUBLISHED."""
        return PUBLISHED if self.checkpoint is None else CHECKPOINT

    def weight_bytes(self, ranks: int, *, attention_dp: bool = False) -> int:
        """Bytes on one of `ranks` ranks: experts divide by tensor or expert parallelism alike; the rest does not where
        attention is data-parallel.
        """
        return self.expert_bytes // ranks + self.dense_bytes // (1 if attention_dp else ranks)


def draft_sizes(name: str, *, fetches: bool = False) -> DraftSizes | None:
    """Read a draft's sizes from the directory or GGUF file `name`, else from published facts; None for an unknown id.

    With `fetches`, an unknown repository's configuration and headers are fetched, unless the hub's cache has them.
    Raises CheckpointError for a checkpoint that is no draft, or cannot be fetched.
    """
    published = published_drafts().get(name)
    if (directory := checkpoint_place(name, fetches=fetches and published is None)) is not None:
        checkpoint = read_draft(directory)
        return DraftSizes(name=name, spec=checkpoint.spec, checkpoint=checkpoint)
    return None if published is None else DraftSizes(name=name, spec=published.spec)


def target_sizes(name: str, *, fetches: bool = False) -> TargetSizes | None:
    """Read a target's sizes from the directory `name`, else from published facts; None where it is known to neither.

    A config.json is enough of a directory. `fetches` as for `draft_sizes`. Raises CheckpointError for a checkpoint that
    is no causal language model, or cannot be fetched.
    """
    published = published_targets().get(name)
    if (directory := checkpoint_place(name, fetches=fetches and published is None)) is not None:
        has_sizes = has_weights(directory) or not is_directory(name)  # the hub knows the sizes of its files
        return _read_target_sizes(name, directory) if has_sizes else _configured_sizes(name, directory)
    return None if published is None else shape_sizes(published)


def checkpoint_place(name: str, *, fetches: bool) -> Path | None:
    """The directory that a name stands for; None for a repository id unless `fetches`, which brings its small files."""
    if is_directory(name) or (name.endswith(GGUF) and is_file(name)):
        return Path(name)
    return configuration_directory(name) if fetches and REPOSITORY_ID.fullmatch(name) else None


def shape_sizes(shape: TargetShape) -> TargetSizes:
    """Sizes of a target that is known by its layers alone."""
    experts = shape.num_expert_layers * shape.num_experts * shape.expert_params * shape.expert_bits / 8
    return TargetSizes(
        name=shape.target,
        spec=PartialTargetSpec(
            hidden_size=shape.hidden_size, num_hidden_layers=shape.num_layers, vocab_size=shape.vocab_size
        ),
        cache=shape.cache,
        expert_bytes=round(experts),
        dense_bytes=round(shape.weight_bytes - experts),
        num_attention_heads=shape.num_attention_heads,
        num_mtp_layers=shape.num_mtp_layers,
    )


def _configured_sizes(name: str, directory: Path) -> TargetSizes:
    config = Facts.load(directory / "config.json")
    spec, text = read_target_spec(config)
    sizes = shape_sizes(shape_of(config, name))
    return msgspec.structs.replace(sizes, spec=spec, num_mtp_layers=num_mtp_layers(text, config))


def _read_target_sizes(name: str, directory: Path) -> TargetSizes:
    checkpoint = read_target(directory)
    expert_bytes = sum(tensor.num_bytes for key, tensor in checkpoint.weights.items() if ".experts." in key)
    return TargetSizes(
        name=name,
        spec=checkpoint.spec,
        num_attention_heads=checkpoint.config.optional("num_attention_heads", checkpoint.config.integer),
        cache=read_target_cache(checkpoint.config, checkpoint.spec.num_hidden_layers),
        expert_bytes=expert_bytes,
        num_mtp_layers=checkpoint.num_mtp_layers,
        dense_bytes=sum(tensor.num_bytes for tensor in checkpoint.weights.values()) - expert_bytes,
        checkpoint=checkpoint,
    )
