# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of a request: each field's type, range and default, for every front end."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Collection, Mapping
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from dflash_trt import _C
from dflash_trt.api.fields import Bounds, checked_number, is_integer, number_fields, refusal
from dflash_trt.api.known_settings import KnownSettings
from dflash_trt.errors import RequestError

LARGEST_PENALTY = 1e6
"""Bound far beyond any use, with which logits stay finite however often a penalty applies."""
MAX_TOP_LOGPROBS = 20
"""Limit of the OpenAI API."""
MAX_BIAS = 100.0
"""Limit of the OpenAI API."""
MAX_N = 16384
"""Default of VLLM_MAX_N_SEQUENCES."""
OPENAI_TEMPERATURE = 1.0
"""Temperature of a server's request that names none, in the OpenAI API, Dynamo and TensorRT-LLM."""
DEFAULT_CHAT_TOKENS = 4096
"""Limit of a server's chat that names no max_tokens: a request reserves cache for all that it may generate."""


class SamplerSettings(msgspec.Struct, metaclass=KnownSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a token is drawn: command line, server, traces, Triton, Dynamo and TensorRT-LLM take each of these fields."""

    temperature: Annotated[
        float, Bounds(0, sys.float_info.max, "0 or more"), Meta(description="0 is greedy decoding.")
    ] = 0.0
    """Divides the logits; 0 is greedy: the most likely token, whatever the other settings."""
    top_k: Annotated[
        int, Bounds(0, 2**31 - 1, "0 to 2^31 - 1, or -1"), Meta(description="Only the k likeliest tokens; 0: all.")
    ] = 0
    """Keeps only the k most likely tokens; 0 or -1: all."""
    top_p: Annotated[
        float, Bounds(math.ulp(0), 1, "more than 0 and at most 1"), Meta(description="Probability mass to keep.")
    ] = 1.0
    """Keeps only the smallest set of most likely tokens whose probabilities reach it; in (0, 1]."""
    min_p: Annotated[
        float, Bounds(0, 1, "0 to 1"), Meta(description="Minimum probability relative to the likeliest token.")
    ] = 0.0
    """Keeps only tokens at least this share as likely as the most likely one; in [0, 1]."""
    repetition_penalty: Annotated[
        float, Bounds(1 / LARGEST_PENALTY, LARGEST_PENALTY, "1e-6 to 1e6"),
        Meta(description="Above 1: tokens of prompt and answer become less likely."),
    ] = 1.0  # fmt: skip
    """Divides positive logits of tokens in prompt or output, multiplies negative ones (arXiv 1909.05858)."""
    presence_penalty: Annotated[
        float, Bounds(-LARGEST_PENALTY, LARGEST_PENALTY, "-1e6 to 1e6"),
        Meta(description="Subtracted from the logits of the answer's tokens."),
    ] = 0.0  # fmt: skip
    """Subtracts from the logit of each token in the output."""
    frequency_penalty: Annotated[
        float, Bounds(-LARGEST_PENALTY, LARGEST_PENALTY, "-1e6 to 1e6"),
        Meta(description="The same for each time that the answer has the token."),
    ] = 0.0  # fmt: skip
    """Subtracts once for each time a token is in the output."""
    seed: Annotated[
        int | None, Bounds(0, 2**64 - 1, "0 to 2^64 - 1"), Meta(description="Fixes the tokens; random if left out.")
    ] = None
    """Seed, 0 to 2^64 - 1; it fixes the tokens, whatever else runs. None: one is drawn, and reported."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """Grammar that the text of an answer must match."""

    kind: Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
    """Language of `text`, as in docs/serve.md."""
    text: str
    """A regular expression, a grammar in EBNF or Lark, or for the other kinds a JSON document."""
    field: str = "structured_outputs"
    """The request's field that errors name."""


class SamplingParams(SamplerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one request, named as in vLLM; the defaults are greedy decoding.

    Raises RequestError, with the field's name, for a value of another type or out of range.
    """

    n: Annotated[int, Bounds(1, MAX_N, f"1 to {MAX_N}")] = 1
    """Answers to each prompt of `LLM.generate` and `LLM.chat`: the `outputs` of its Completion."""
    max_tokens: Annotated[int, Bounds(1, math.inf, "at least 1")] = 128
    """Maximum number of tokens to generate."""
    min_tokens: Annotated[int, Bounds(0, math.inf, "0 or more")] = 0
    """Minimum number of tokens: until then no token and no `stop` text that would end the answer ends it."""
    stop: Collection[str] | None = ()
    """One or several texts that end the answer; they are cut from its text. Held as a tuple."""
    stop_token_ids: int | Collection[int] | None = ()
    """Tokens that end the answer beside the target's end-of-sequence tokens; they stay in its tokens. Held as a set."""
    ignore_eos: bool = False
    """Keep generating past end-of-sequence tokens."""
    logprobs: bool | int | None = False
    """Return the log probability of each emitted token; a number also sets `top_logprobs`."""
    top_logprobs: Annotated[int, Bounds(0, MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}")] = 0
    """Number of alternatives to report per token, 0 to 20."""
    prompt_logprobs: bool | int | None = False
    """Return log probabilities of the prompt's tokens but the first; the prompt is then not read from the cache."""
    logit_bias: Mapping[int, float] | None = None
    """Numbers to add to the logits of these tokens, -100 to 100 each."""
    structured_outputs: Grammar | None = None
    """Grammar of the whole text, unless it ends at max_tokens; needs the package llguidance."""
    draft_length: Annotated[int | None, Bounds(0, math.inf, "0 or more")] = None
    """Draft tokens to verify in a step: this many where the runtime chooses (`auto`), at most this many where that is
    fixed; 0 is plain decoding, None leaves it to the runtime. The output does not depend on it."""

    def __post_init__(self) -> None:
        if self.top_k is not True and self.top_k == -1:
            self._set("top_k", 0)
        for name in ("logprobs", "prompt_logprobs"):
            self._count_is_true(name)
        for name, field in NUMBERS.items():
            if (value := getattr(self, name)) is not None or field.default is not None:
                self._set(name, checked_number(name, value, field))
        self._set("stop", _texts(self.stop))
        self._set("stop_token_ids", _token_ids(self.stop_token_ids))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        for name in ("ignore_eos", "logprobs", "prompt_logprobs"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name}: expected True or False, found {value!r}")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, Grammar):
                raise refusal("structured_outputs", "a Grammar", self.structured_outputs)
            if self.ignore_eos:
                raise refusal("ignore_eos", "False with structured_outputs, whose text ends", True)
            if self.min_tokens:
                raise refusal("min_tokens", "0 with structured_outputs, whose text ends", self.min_tokens)

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def stop_ids(self) -> frozenset[int]:
        """`stop_token_ids` as a set."""
        return cast("frozenset[int]", self.stop_token_ids)

    def sampler(self) -> _C.SamplerParams:
        """The settings for the sampling rule; draws a seed where none is given."""
        settings = {name: getattr(self, name) for name in SAMPLER_FIELDS}
        return _C.SamplerParams(**settings | {"seed": secrets.randbits(64) if self.seed is None else self.seed})

    def nth(self, index: int) -> SamplingParams:
        """Parameters of answer `index` of `n`: a seed is increased by the index, as in vLLM."""
        if self.n == 1 and index == 0:
            return self
        seed = self.seed if self.seed is None else (self.seed + index) % 2**64
        return msgspec.structs.replace(self, n=1, seed=seed)

    def _count_is_true(self, name: str) -> None:
        """Turns vLLM's number of alternatives into True and `top_logprobs`."""
        value = getattr(self, name)
        if is_integer(value):
            if self.top_logprobs not in (0, value):
                raise refusal(name, f"True, or top_logprobs, which is {self.top_logprobs}", value)
            self._set("top_logprobs", value)
        self._set(name, value if not (is_integer(value) or value is None) else value is not None)

    def _set(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)


NUMBERS = number_fields(SamplingParams)
"""The numbers of SamplingParams, from which checks and front ends are made."""
SAMPLER_FIELDS = {name: NUMBERS[name] for name in SamplerSettings.__struct_fields__}


def _texts(given: object) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else () if given is None else given
    if not isinstance(texts, list | tuple | set | frozenset) or not all(isinstance(t, str) and t for t in texts):
        raise refusal("stop", "a text of at least one character, or a list of them", given)
    return tuple(sorted(texts)) if isinstance(texts, set | frozenset) else tuple(texts)


def _token_ids(given: object) -> frozenset[int]:
    ids = (given,) if is_integer(given) else () if given is None else given
    if hasattr(ids, "tolist"):  # numpy, torch
        ids = ids.tolist()
    if not isinstance(ids, list | tuple | set | frozenset) or not all(is_integer(i) and i >= 0 for i in ids):
        raise refusal("stop_token_ids", "a token id, or a list of them", given)
    return frozenset(map(int, ids))


def _logit_bias(given: object) -> dict[int, float] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(
        is_integer(token) and token >= 0 and isinstance(bias, int | float) and -MAX_BIAS <= bias <= MAX_BIAS
        for token, bias in given.items()
    ):
        raise refusal("logit_bias", "a bias of -100 to 100 for each token id", given)
    return {int(token): float(bias) for token, bias in given.items() if bias} or None
