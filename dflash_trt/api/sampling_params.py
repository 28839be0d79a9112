# SPDX-License-Identifier: Apache-2.0
"""What a request asks for: how tokens are drawn, and where the answer ends."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any, Literal, cast

import msgspec

from dflash_trt import _C
from dflash_trt.api.vllm_names import SETTINGS, refuse_others
from dflash_trt.errors import RequestError

LARGEST_PENALTY = 1e6
"""And 1 / this for what divides: far beyond any use, and logits stay finite however often it applies."""


MAX_TOP_LOGPROBS = 20
MAX_BIAS = 100.0
"""Both as in the OpenAI API."""
MAX_N = 16384
"""As VLLM_MAX_N_SEQUENCES is unless set."""

SAMPLER_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Settings that say how a token is drawn; the others say from what seed, and where the answer ends."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of an answer must match."""

    kind: Literal["json_schema", "regex", "grammar", "structural_tag"]
    """The last two are xgrammar's own: EBNF, and texts in tags."""
    text: str
    """A JSON document, but for a regex and EBNF."""
    field: str = "structured_outputs"
    """What an error calls it."""


class _NamedSettings(msgspec.StructMeta):
    """Refuses settings that there are not as RequestError, not TypeError."""

    def __call__(self, *args: object, **settings: object) -> Any:
        fields = self.__struct_fields__
        others = {name: settings.pop(name) for name in sorted(settings.keys() - set(fields))}
        refuse_others(others, SETTINGS, "SamplingParams", f"one of {', '.join(sorted(fields))}")
        return super().__call__(*args, **settings)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_NamedSettings):
    """Settings of one request, named as in vLLM; the defaults are greedy decoding.

    Raises RequestError, with the field's name, for a value of another type or out of range.
    """

    n: int = 1
    """Answers to each prompt of `LLM.generate` and `LLM.chat`: the `outputs` of its Completion."""
    max_tokens: int = 128
    """Of the answer."""
    temperature: float = 0.0
    """0 is greedy: the most likely token, whatever the other settings."""
    top_k: int = 0
    """Only the k most likely tokens; 0 or -1: all."""
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
    stop: Collection[str] | None = ()
    """A text, or texts, that end the answer; they are cut from its text. Held as a tuple."""
    stop_token_ids: int | Collection[int] | None = ()
    """Tokens that end the answer beside the target's end-of-sequence tokens; they stay in its tokens. Held as a set."""
    ignore_eos: bool = False
    """Whether the target's end-of-sequence tokens end the answer no more."""
    logprobs: bool | int | None = False
    """Whether the log probability of each emitted token is returned; a number is that of `top_logprobs`, too."""
    top_logprobs: int = 0
    """And those of so many most likely tokens in its place, at most 20."""
    prompt_logprobs: bool | int | None = False
    """Whether the same is returned for each token of the prompt but the first; nothing of it is read from a cache."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens, -100 to 100 each."""
    structured_outputs: Grammar | None = None
    """What the whole text must match where it does not end at max_tokens; needs the package xgrammar."""
    draft_length: int | None = None
    """Draft tokens to verify in a step: this many where the runtime chooses (`auto`), at most this many where that is
    fixed; 0 is plain decoding, None leaves it to the runtime. The output does not depend on it."""

    def __post_init__(self) -> None:
        self._integer("n", 1, MAX_N, f"1 to {MAX_N}")
        self._integer("max_tokens", 1, math.inf, "at least 1")
        self._number("temperature", lambda value: 0 <= value < math.inf, "0 or more")
        if self.top_k is not True and self.top_k == -1:
            self._set("top_k", 0)
        self._integer("top_k", 0, 2**31 - 1, "0 to 2^31 - 1, or -1")
        self._number("top_p", lambda value: 0 < value <= 1, "more than 0 and at most 1")
        self._number("min_p", lambda value: 0 <= value <= 1, "0 to 1")
        self._number("repetition_penalty", lambda value: 1 / LARGEST_PENALTY <= value <= LARGEST_PENALTY, "1e-6 to 1e6")
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, lambda value: abs(value) <= LARGEST_PENALTY, "-1e6 to 1e6")
        if self.seed is not None:
            self._integer("seed", 0, 2**64 - 1, "0 to 2^64 - 1")
        if self.draft_length is not None:
            self._integer("draft_length", 0, math.inf, "0 or more")
        self._set("stop", _texts(self.stop))
        self._set("stop_token_ids", _token_ids(self.stop_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            self._count_is_true(name)
        self._integer("top_logprobs", 0, MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}")
        self._set("logit_bias", _logit_bias(self.logit_bias))
        for name in ("ignore_eos", "logprobs", "prompt_logprobs"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name}: expected True or False, found {value!r}")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, Grammar):
                raise _refusal("structured_outputs", "a Grammar", self.structured_outputs)
            if self.ignore_eos:
                raise _refusal("ignore_eos", "False with structured_outputs, whose text ends", True)

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as it is held."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def stop_ids(self) -> frozenset[int]:
        """`stop_token_ids` as they are held."""
        return cast("frozenset[int]", self.stop_token_ids)

    def sampler(self) -> _C.SamplerParams:
        """The settings as the sampling rule takes them; draws a seed where none is given."""
        seed = secrets.randbits(64) if self.seed is None else self.seed
        return _C.SamplerParams(**{name: getattr(self, name) for name in SAMPLER_FIELDS}, seed=seed)

    def nth(self, index: int) -> SamplingParams:
        """Of answer `index` of `n`: a seed is increased by the index, as in vLLM."""
        seed = self.seed if self.seed is None else (self.seed + index) % 2**64
        return msgspec.structs.replace(self, n=1, seed=seed)

    def _count_is_true(self, name: str) -> None:
        """vLLM's number of log probabilities in a place, as True and `top_logprobs`."""
        value = getattr(self, name)
        if is_integer(value):
            if self.top_logprobs not in (0, value):
                raise _refusal(name, f"True, or top_logprobs, which is {self.top_logprobs}", value)
            self._set("top_logprobs", value)
        self._set(name, value if not (is_integer(value) or value is None) else value is not None)

    def _set(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)

    def _integer(self, name: str, low: int, high: float, expected: str) -> None:
        value = getattr(self, name)
        if not is_integer(value):
            raise _refusal(name, f"an integer, {expected}", value)
        if not low <= value <= high:
            raise _refusal(name, expected, value)
        self._set(name, int(value))

    def _number(self, name: str, holds: Callable[[float], bool], expected: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, Real) or isinstance(value, bool):
            raise _refusal(name, f"a number, {expected}", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not holds(number):
            raise _refusal(name, expected, value)
        self._set(name, number)


def is_integer(value: object) -> bool:
    """Whether it is an integer of Python or numpy; a truth value is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _texts(given: object) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else () if given is None else given
    if not isinstance(texts, list | tuple | set | frozenset) or not all(isinstance(t, str) and t for t in texts):
        raise _refusal("stop", "a text of at least one character, or a list of them", given)
    return tuple(sorted(texts)) if isinstance(texts, set | frozenset) else tuple(texts)


def _token_ids(given: object) -> frozenset[int]:
    ids = (given,) if is_integer(given) else () if given is None else given
    if hasattr(ids, "tolist"):  # numpy, torch
        ids = ids.tolist()
    if not isinstance(ids, list | tuple | set | frozenset) or not all(is_integer(i) and i >= 0 for i in ids):
        raise _refusal("stop_token_ids", "a token id, or a list of them", given)
    return frozenset(map(int, ids))


def _logit_bias(given: object) -> dict[int, float] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(
        is_integer(token) and token >= 0 and isinstance(bias, int | float) and -MAX_BIAS <= bias <= MAX_BIAS
        for token, bias in given.items()
    ):
        raise _refusal("logit_bias", "a bias of -100 to 100 for each token id", given)
    return {int(token): float(bias) for token, bias in given.items() if bias} or None


def _refusal(name: str, expected: str, found: object) -> RequestError:
    return RequestError(f"{name}: expected {expected}, found {found!r}")
