# SPDX-License-Identifier: Apache-2.0
"""Which tokens a trimmed head keeps: those that the target writes often, and those that any text may need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.errors import BuildError
from dflash_trt.runtime.measure.features import open_features

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
