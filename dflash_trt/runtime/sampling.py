# SPDX-License-Identifier: Apache-2.0
"""What a request asks for: how tokens are drawn, and where the answer ends."""

from __future__ import annotations

import math
import secrets

import msgspec

from dflash_trt import _C
from dflash_trt.errors import RequestError

LARGEST_PENALTY = 1e6
"""And 1 / this for what divides: far beyond any use, and logits stay finite however often it applies."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one request; the defaults are greedy decoding.

    Raises RequestError for a value out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy: the most likely token, whatever the other settings."""
    top_k: int = 0
    """Only the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens whose probabilities reach it; in (0, 1]."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the most likely one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or output, multiplies negative ones (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time a token is in the output."""
    seed: int | None = None
    """0 to 2^64 - 1: the same seed draws the same tokens, whatever else runs. None: one is drawn, and reported."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are cut from its text."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer beside the target's end-of-sequence tokens; they stay in its tokens."""
    ignore_eos: bool = False
    """Whether the target's end-of-sequence tokens end the answer no more."""
    logprobs: bool = False
    """Whether the log probability of each emitted token is returned."""

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more")
        _check("top_k", self.top_k, 0 <= self.top_k < 2**31, "0 to 2^31 - 1")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        is_factor = 1 / LARGEST_PENALTY <= self.repetition_penalty <= LARGEST_PENALTY
        _check("repetition_penalty", self.repetition_penalty, is_factor, "1e-6 to 1e6")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _check(name, penalty, abs(penalty) <= LARGEST_PENALTY, "-1e6 to 1e6")
        _check("seed", self.seed, self.seed is None or 0 <= self.seed < 2**64, "0 to 2^64 - 1")
        is_texts = not isinstance(self.stop, str) and all(isinstance(text, str) and text for text in self.stop)
        _check("stop", self.stop, is_texts, "a tuple of texts of at least one character")

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def sampler(self) -> _C.SamplingParams:
        """The settings as the sampling rule takes them; draws a seed where none is given."""
        return _C.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=secrets.randbits(64) if self.seed is None else self.seed,
        )


def _check(name: str, found: object, holds: bool, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name}: expected {expected}, found {found}")
