# SPDX-License-Identifier: Apache-2.0
"""Feature files: a target's hidden states on its own answers, to calibrate and measure a drafter without the target.

A safetensors file. For sequence i with n tokens, of which p are the prompt, 1 <= p < n:

    tokens.i         I64   [n]           prompt and answer
    prompt_length.i  I64   []            p
    taps.i           float [n - 1, A*H]  row j belongs to tokens.i[j]; the last token was never run
    embeddings.i     float [n - p, H]    the target's input embeddings of tokens.i[p:]

Once per file: `mask_embedding` float [H], `lm_head` float [V, H] and, if the head has one, `lm_head_bias` float [V];
and `embed_tokens` float [V, H] for a LiLiCorr draft, which reads the target's embeddings of all its candidates.
A float is F32, or BF16 if that is exact or was requested for the taps. Beside each tensor NAME stands `crc32.NAME`, I64
[], the CRC-32 of its bytes. The header's metadata holds `FeatureFacts`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.safetensors_file import Expected, StoredTensor, check_tensors, read_tensors
from dflash_trt.checkpoint.target_checkpoint import TargetSpec
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.errors import BuildError, CheckpointError
from dflash_trt.files.json_file import SchemaVersion, json_value
from dflash_trt.quantize.bounds import CAPTURE

METADATA_KEY = "dflash_trt_features"
SCHEMA_VERSION = 4
MASK_EMBEDDING, LM_HEAD, LM_HEAD_BIAS = "mask_embedding", "lm_head", "lm_head_bias"
EMBED_TOKENS = "embed_tokens"
FLOATS = ("F32", "BF16")
CHECKSUM = "crc32."
"""Prefix of a tensor's name that names its checksum."""


class PromptFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of a prompt in the prompts' file, besides its text."""

    name: str
    category: str | None = None
    language: str | None = None


class FeatureFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Target, draft and settings of a capture."""

    schema_version: int
    tool_version: str
    target_name: str
    """Repository id or directory name."""
    target: TargetSpec
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    max_tokens: int
    """Every answer has this number of tokens, or ends with the first of `stop_token_ids`."""
    stop_token_ids: tuple[int, ...]
    prompts: tuple[PromptFacts, ...]
    """Facts of each sequence's prompt."""
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Temperature that the answers were sampled at; 0: greedy."""
    seed: int = 0
    """Sequence i was sampled with seed + i."""
    target_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the target was computed in."""
    has_embedding: bool = False
    """Whether the file holds the target's whole embedding."""

    def sampler_seed(self, i: int) -> int:
        """Seed that sequence `i` was sampled with."""
        return (self.seed + i) % 2**64

    @property
    def num_sequences(self) -> int:
        """Prompts with their answers."""
        return len(self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSequence:
    """One prompt and the target's answer."""

    tokens: torch.Tensor
    """[n] int64."""
    prompt_length: int
    """p: tokens before the answer, 1 <= p < n."""
    taps: torch.Tensor
    """[n - 1, A*H] FLOAT or BF16."""
    embeddings: torch.Tensor
    """[n - p, H] FLOAT or BF16: of the answer's tokens."""

    def random_anchors(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Draws up to `count` token indices of the answer but the last, sorted."""
        candidates = np.arange(self.prompt_length, len(self.tokens) - 1)
        return np.sort(generator.choice(candidates, size=min(count, len(candidates)), replace=False))


def tensor_shapes(facts: FeatureFacts, lengths: Sequence[tuple[int, int]], *, has_bias: bool) -> Expected:
    """Every tensor of a file whose sequences have these numbers of tokens and prompt tokens."""
    H, V = facts.target.hidden_size, facts.target.vocab_size
    shapes: Expected = {MASK_EMBEDDING: (FLOATS, (H,)), LM_HEAD: (FLOATS, (V, H))}
    if has_bias:
        shapes[LM_HEAD_BIAS] = (FLOATS, (V,))
    if facts.has_embedding:
        shapes[EMBED_TOKENS] = (FLOATS, (V, H))
    for i, (n, p) in enumerate(lengths):
        shapes |= {
            f"tokens.{i}": (("I64",), (n,)),
            f"prompt_length.{i}": (("I64",), ()),
            f"taps.{i}": (FLOATS, (n - 1, len(facts.target_layer_ids) * H)),
            f"embeddings.{i}": (FLOATS, (n - p, H)),
        }
    return shapes | {f"{CHECKSUM}{name}": (("I64",), ()) for name in shapes}


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the bytes of a tensor on the CPU."""
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


class FeatureFile:
    """An open feature file that fits a draft; tensors are read when they are asked for."""

    def __init__(self, file: Path, handle: safe_open, facts: FeatureFacts) -> None:
        self.file = file
        self.facts = facts
        self._handle = handle

    def mask_embedding(self) -> torch.Tensor:
        """[H]: the target's input embedding of the mask token."""
        return self._tensor(MASK_EMBEDDING)

    def embed_tokens(self) -> torch.Tensor:
        """[V, H]: the target's embedding, where `facts.has_embedding`."""
        return self._tensor(EMBED_TOKENS)

    def lm_head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target's lm_head: weight [V, H], and its bias [V] where it has one."""
        names = self._handle.keys()  # type: ignore[no-untyped-call]
        return self._tensor(LM_HEAD), self._tensor(LM_HEAD_BIAS) if LM_HEAD_BIAS in names else None

    def sequences(self) -> Iterator[FeatureSequence]:
        """The sequences in order, one in memory at a time."""
        for i in range(self.facts.num_sequences):
            yield self.sequence(i)

    def sequence(self, i: int) -> FeatureSequence:
        """One sequence; raises CheckpointError for impossible values."""
        sequence = FeatureSequence(
            tokens=self._tensor(f"tokens.{i}"),
            prompt_length=int(self._tensor(f"prompt_length.{i}")),
            taps=self._tensor(f"taps.{i}"),
            embeddings=self._tensor(f"embeddings.{i}"),
        )
        self._check(i, sequence)
        return sequence

    def prompt(self, i: int) -> torch.Tensor:
        """The tokens [p] of sequence `i`'s prompt, without its taps being read."""
        tokens = self._tensor(f"tokens.{i}")
        self._check_prompt_length(i, length := int(self._tensor(f"prompt_length.{i}")), len(tokens))
        return tokens[:length]

    def answer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens [n - p] of sequence `i`'s answer and their embeddings [n - p, H], without its taps being read."""
        embeddings = self._tensor(f"embeddings.{i}")
        return self._tensor(f"tokens.{i}")[-len(embeddings) :], embeddings

    def answered_prompts(self) -> dict[int, tuple[int, ...]]:
        """Token ids of the prompt of each sequence whose answer has a verify pass: two tokens or more."""
        answered = (i for i in range(self.facts.num_sequences) if self.answer_length(i) > 1)
        return {i: tuple(self.prompt(i).tolist()) for i in answered}

    def answer_length(self, i: int) -> int:
        """Tokens that the target wrote in sequence `i`."""
        rows: int = self._handle.get_slice(f"embeddings.{i}").get_shape()[0]  # type: ignore[no-untyped-call]
        return rows

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle.get_tensor(name)  # type: ignore[no-untyped-call]
        if checksum(tensor) != int(self._handle.get_tensor(f"{CHECKSUM}{name}")):  # type: ignore[no-untyped-call]
            raise CheckpointError(
                f"{self.file}: {name} has changed since it was captured (CRC-32)", hint=f"capture again: {CAPTURE}"
            )
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{self.file}: {name} contains NaN or infinity")
        return tensor

    def _check_prompt_length(self, i: int, found: int, num_tokens: int) -> int:
        """The prompt's length; raises CheckpointError where it is not that of the tokens without an embedding."""
        if found != (length := num_tokens - self.answer_length(i)):
            raise CheckpointError(
                f"{self.file}: prompt_length.{i}: expected {length} (the tokens without an embedding), found {found}"
            )
        return length

    def _check(self, i: int, sequence: FeatureSequence) -> None:
        length = self._check_prompt_length(i, sequence.prompt_length, len(sequence.tokens))
        low, high = int(sequence.tokens.min()), int(sequence.tokens.max())
        if low < 0 or high >= self.facts.target.vocab_size:
            raise CheckpointError(
                f"{self.file}: tokens.{i}: expected token ids from 0 to {self.facts.target.vocab_size - 1}, found"
                f" {low if low < 0 else high}"
            )
        # An answer that was cut would be replayed with another last block than was decoded.
        answer = sequence.tokens[length:].tolist()
        stops = [index for index, token in enumerate(answer, start=1) if token in self.facts.stop_token_ids]
        expected = min([self.facts.max_tokens, *stops])
        if len(answer) != expected:
            raise CheckpointError(
                f"{self.file}: tokens.{i}: expected an answer that ends after {expected} tokens (max_tokens, or its"
                f" first stop token), found {len(answer)}",
                hint=f"capture again: {CAPTURE}",
            )


@contextmanager
def open_features(file: Path, spec: DraftSpec) -> Iterator[FeatureFile]:
    """Opens a feature file for the draft with the facts `spec`.

    Raises CheckpointError when it is damaged, or was captured from a target or with taps that do not fit the draft.
    """
    tensors = read_tensors(file)
    with safe_open(file, framework="pt") as handle:
        facts = _read_facts(file, handle.metadata() or {})
        _check_fits(file, facts, spec)
        _check_layout(file, facts, spec, tensors)
        yield FeatureFile(file, handle, facts)


def _read_facts(file: Path, metadata: dict[str, str]) -> FeatureFacts:
    if METADATA_KEY not in metadata:
        raise CheckpointError(
            f"{file}: expected features that dflash-trt captured, found a safetensors file without the metadata"
            f" {METADATA_KEY}",
            hint=CAPTURE,
        )
    content, where = metadata[METADATA_KEY].encode(), f"{file}: metadata {METADATA_KEY}"
    version = json_value(content, where, SchemaVersion, CheckpointError, what="facts", hint=CAPTURE).schema_version
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
    if spec.lilicorr is not None and not facts.has_embedding:
        raise CheckpointError(f"{file} lacks the target's embedding, which a LiLiCorr draft reads", hint=hint)
    try:
        check_pair(spec, facts.target, draft_name="the draft", target_name=f"{facts.target_name} of {file}")
    except CheckpointError as error:
        raise CheckpointError(error.message, hint=hint) from None


def _check_layout(file: Path, facts: FeatureFacts, spec: DraftSpec, tensors: dict[str, StoredTensor]) -> None:
    lengths = []
    for i in range(facts.num_sequences):
        num_tokens, rows = (
            next(iter(_find(file, tensors, f"{kind}.{i}").shape), 0) for kind in ("tokens", "embeddings")
        )
        if not 1 <= rows < num_tokens <= spec.max_position_embeddings:
            raise CheckpointError(
                f"{file}: tokens.{i}: expected a prompt, an answer and at most {spec.max_position_embeddings} tokens"
                f" (max_position_embeddings), found {num_tokens} tokens, {rows} of them the answer"
            )
        lengths.append((num_tokens, num_tokens - rows))
    expected = tensor_shapes(facts, lengths, has_bias=LM_HEAD_BIAS in tensors)
    check_tensors(file, expected, tensors, described_by="its metadata", hint=f"capture again: {CAPTURE}")


def _find(file: Path, tensors: dict[str, StoredTensor], name: str) -> StoredTensor:
    if name not in tensors:
        raise CheckpointError(f"{file}: missing tensor {name!r}", hint=f"capture again: {CAPTURE}")
    return tensors[name]


BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # SentencePiece's byte fallback


def captured_tokens(spec: DraftSpec, features: Path, target: Path, num_tokens: int) -> NDArray[np.int64]:
    """The `num_tokens` rows of a trimmed head, rising: special and byte tokens, then by frequency in the answers.

    Raises as `open_features`, `load_tokenizer` and `frequent_tokens` do.
    """
    with open_features(features, spec) as file:
        vocab_size = file.facts.target.vocab_size
        counts = np.zeros(vocab_size, dtype=np.int64)
        for i in range(file.facts.num_sequences):
            counts += np.bincount(file.answer(i)[0].numpy(), minlength=vocab_size)
    return frequent_tokens(counts, [i for i in _indispensable(target) if i < vocab_size], num_tokens)


def frequent_tokens(counts: NDArray[np.int64], always_kept: Sequence[int], num_tokens: int) -> NDArray[np.int64]:
    """The ids [N], rising, of `always_kept` and the most frequent others by `counts` [V]; BuildError for a wrong N."""
    always = np.unique(np.array(always_kept, dtype=np.int64))
    if not len(always) <= num_tokens < len(counts):
        raise BuildError(
            f"--head trim:{num_tokens}: expected {len(always)} (special and byte tokens, which stay) to"
            f" {len(counts) - 1} tokens, found {num_tokens}"
        )
    order = np.argsort(-counts, kind="stable")
    frequent = order[~np.isin(order, always)][: num_tokens - len(always)]
    return np.sort(np.concatenate([always, frequent]))


def kept_shares(spec: DraftSpec, features: Path, token_ids: NDArray[np.int64]) -> dict[str | None, float]:
    """Share of the captured answers' tokens among `token_ids`: under None of all, then by language, sorted."""
    written: dict[str | None, list[NDArray[np.int64]]] = {}
    with open_features(features, spec) as file:
        for i, prompt in enumerate(file.facts.prompts):
            for language in {None, prompt.language}:
                written.setdefault(language, []).append(file.answer(i)[0].numpy())
    languages = [None, *sorted(language for language in written if language is not None)]
    return {name: float(np.isin(np.concatenate(written[name]), token_ids).mean()) for name in languages}


def _indispensable(target: Path) -> list[int]:
    """Special and added tokens, and the single bytes of a byte-level or byte-fallback vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = load_tokenizer(target)
    alphabet = set(ByteLevel.alphabet())
    single = [i for token, i in tokenizer.get_vocab().items() if token in alphabet or BYTE.fullmatch(token)]
    return sorted({*single, *tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})
