# SPDX-License-Identifier: Apache-2.0
"""Feature files: what a target said on its own answers, so that a drafter is calibrated without the target.

A safetensors file; docs/calibration.md has the layout. Of sequence i, n tokens of which p are the prompt:

    tokens.i         I64  [n]           prompt and answer
    prompt_length.i  I64  []            p
    taps.i           BF16 [n - 1, A*H]  row j belongs to tokens.i[j]; the last token was never run
    embeddings.i     BF16 [n - p, H]    the target's input embeddings of tokens.i[p:]

and once `mask_embedding` BF16 [H]. The header's metadata holds `FeatureFacts` as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.safetensors_file import Tensor, read_tensors
from dflash_trt.checkpoint.safetensors_writer import Layout
from dflash_trt.checkpoint.target_checkpoint import TargetSpec, check_pair
from dflash_trt.errors import CheckpointError
from dflash_trt.files.json_file import json_value
from dflash_trt.quantize.ranges import CAPTURE

METADATA_KEY = "dflash_trt_features"
SCHEMA_VERSION = 1
MASK_EMBEDDING = "mask_embedding"


class FeatureFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the features were captured from and for."""

    schema_version: int
    tool_version: str
    target_name: str
    """Repository id or directory name."""
    target: TargetSpec
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_sequences: int


class _SchemaVersion(msgspec.Struct):
    schema_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSequence:
    """One prompt and the target's answer."""

    tokens: torch.Tensor
    """[n] int64."""
    prompt_length: int
    """p: tokens before the answer, 1 <= p < n."""
    taps: torch.Tensor
    """[n - 1, A*H] BF16."""
    embeddings: torch.Tensor
    """[n - p, H] BF16: of the answer's tokens."""


def sequence_layout(i: int, num_tokens: int, prompt_length: int, target_hidden_size: int, hidden_size: int) -> Layout:
    """dtype and shape of the four tensors of sequence `i`, by name."""
    return {
        f"tokens.{i}": ("I64", (num_tokens,)),
        f"prompt_length.{i}": ("I64", ()),
        f"taps.{i}": ("BF16", (num_tokens - 1, target_hidden_size)),
        f"embeddings.{i}": ("BF16", (num_tokens - prompt_length, hidden_size)),
    }


class FeatureFile:
    """An open feature file that fits a draft; tensors are read when they are asked for."""

    def __init__(self, file: Path, spec: DraftSpec, handle: safe_open, facts: FeatureFacts) -> None:
        self.file = file
        self.facts = facts
        self._spec = spec
        self._handle = handle

    def mask_embedding(self) -> torch.Tensor:
        """[H] BF16: the target's input embedding of the mask token."""
        return self._tensor(MASK_EMBEDDING)

    def sequences(self) -> Iterator[FeatureSequence]:
        """The sequences in order, one in memory at a time; raises CheckpointError for impossible values."""
        for i in range(self.facts.num_sequences):
            sequence = FeatureSequence(
                tokens=self._tensor(f"tokens.{i}"),
                prompt_length=int(self._tensor(f"prompt_length.{i}")),
                taps=self._tensor(f"taps.{i}"),
                embeddings=self._tensor(f"embeddings.{i}"),
            )
            self._check(i, sequence)
            yield sequence

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle.get_tensor(name)  # type: ignore[no-untyped-call]
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{self.file}: {name}: expected finite values, found NaN or infinity")
        return tensor

    def _check(self, i: int, sequence: FeatureSequence) -> None:
        length = len(sequence.tokens) - len(sequence.embeddings)
        if sequence.prompt_length != length:
            raise CheckpointError(
                f"{self.file}: prompt_length.{i}: expected {length} (the tokens without an embedding), found"
                f" {sequence.prompt_length}"
            )
        low, high = int(sequence.tokens.min()), int(sequence.tokens.max())
        if low < 0 or high >= self._spec.vocab_size:
            raise CheckpointError(
                f"{self.file}: tokens.{i}: expected token ids from 0 to {self._spec.vocab_size - 1}, found"
                f" {low if low < 0 else high}"
            )


@contextmanager
def open_features(file: Path, spec: DraftSpec) -> Iterator[FeatureFile]:
    """Opens a feature file for the draft with the facts `spec`.

    Raises CheckpointError when it is no feature file, is damaged, or was captured from a target or with taps
    that do not fit the draft; the error names the fact.
    """
    tensors = read_tensors(file)
    with safe_open(file, framework="pt") as handle:
        facts = _read_facts(file, handle.metadata() or {})
        _check_fits(file, facts, spec)
        _check_layout(file, facts, spec, tensors)
        yield FeatureFile(file, spec, handle, facts)


def _read_facts(file: Path, metadata: dict[str, str]) -> FeatureFacts:
    if METADATA_KEY not in metadata:
        raise CheckpointError(
            f"{file}: expected features that dflash-trt captured, found a safetensors file without the metadata"
            f" {METADATA_KEY}",
            hint=CAPTURE,
        )
    content, where = metadata[METADATA_KEY].encode(), f"{file}: metadata {METADATA_KEY}"
    version = json_value(content, where, _SchemaVersion, CheckpointError, what="facts", hint=CAPTURE).schema_version
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{file}: schema_version: expected {SCHEMA_VERSION}, found {version}",
            hint=f"capture again with this version: {CAPTURE}",
        )
    return json_value(content, where, FeatureFacts, CheckpointError, what="facts", hint=CAPTURE)


def _check_fits(file: Path, facts: FeatureFacts, spec: DraftSpec) -> None:
    hint = f"capture with this draft and its target: {CAPTURE}"
    for fact in ("target_layer_ids", "mask_token_id"):
        expected, found = getattr(spec, fact), getattr(facts, fact)
        if expected != found:
            raise CheckpointError(f"{file}: {fact}: expected {expected} (draft), found {found}", hint=hint)
    try:
        check_pair(spec, facts.target, draft_name="the draft", target_name=f"{facts.target_name} of {file}")
    except CheckpointError as error:
        raise CheckpointError(error.message, hint=hint) from None


def _check_layout(file: Path, facts: FeatureFacts, spec: DraftSpec, tensors: dict[str, Tensor]) -> None:
    expected: Layout = {MASK_EMBEDDING: ("BF16", (spec.hidden_size,))}
    for i in range(facts.num_sequences):
        num_tokens, rows = (_rows(file, tensors, f"{name}.{i}") for name in ("tokens", "embeddings"))
        if not 1 <= rows < num_tokens <= spec.max_position_embeddings:
            raise CheckpointError(
                f"{file}: tokens.{i}: expected a prompt, an answer and at most {spec.max_position_embeddings} tokens"
                f" (max_position_embeddings), found {num_tokens} tokens, {rows} of them the answer"
            )
        expected |= sequence_layout(i, num_tokens, num_tokens - rows, spec.target_hidden_size, spec.hidden_size)
    for name, (dtype, shape) in expected.items():
        found = _find(file, tensors, name)
        if (found.dtype, found.shape) != (dtype, shape):
            raise CheckpointError(
                f"{file}: tensor {name!r}: expected {dtype} {list(shape)}, found {found.dtype} {list(found.shape)}"
            )
    if surplus := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(
            f"{file}: expected {facts.num_sequences} sequences and no other tensors, found {surplus[0]!r} besides"
        )


def _rows(file: Path, tensors: dict[str, Tensor], name: str) -> int:
    shape = _find(file, tensors, name).shape
    return shape[0] if shape else 0


def _find(file: Path, tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise CheckpointError(
            f"{file}: expected tensor {name!r}, found no such tensor", hint=f"capture again: {CAPTURE}"
        )
    return tensors[name]
