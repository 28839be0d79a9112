# SPDX-License-Identifier: Apache-2.0
"""What a body of the OpenAI API asks for; what we would have to answer otherwise is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec

from dflash_trt.errors import RequestError
from dflash_trt.runtime.backend import Prompt
from dflash_trt.runtime.sampling import SamplingParams, is_integer
from dflash_trt.server.http_refusal import Refusal

SAMPLING = frozenset(SamplingParams.__struct_fields__) - {"max_tokens", "logprobs"}  # which are read apart
OURS = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "logprobs",
    "top_logprobs", "return_steps",
}  # fmt: skip
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "parallel_tool_calls", "skip_special_tokens", "return_token_ids",
}  # fmt: skip
"""What does not change the text of an answer. Special tokens are never in it."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
"""What is known and not served, with the values that ask for nothing."""
STREAM_OPTIONS = {"include_usage", "include_obfuscation", "continuous_usage_stats"}
DEFAULT_MAX_TOKENS = 16
"""OpenAI's, of a completion."""
DEFAULT_CHAT_TOKENS = 4096
"""At most, of a chat's answer: a request reserves the room for all that it may become."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A request, read."""

    prompts: list[Prompt]
    """Of a completion; empty in a chat."""
    messages: list[dict[str, Any]]
    """Of a chat; empty in a completion."""
    params: SamplingParams
    """Without max_tokens, which may depend on the length of the prompt."""
    max_tokens: int | None
    """None: what fits, up to DEFAULT_CHAT_TOKENS."""
    n: int
    stream: bool
    include_usage: bool
    return_steps: bool

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return bool(self.messages)


def read_question(body: dict[str, Any], model: str, *, is_chat: bool) -> Question:
    """Raises RequestError, with the field's name, for what is wrong or not served, Refusal for another model."""
    given = {name: value for name, value in body.items() if value is not None}
    _check_names(given)
    if given.get("model", model) != model:
        raise Refusal(404, f"model: expected {model}, found {given['model']!r}", code="model_not_found")
    options = given.pop("stream_options", {})
    if not isinstance(options, dict) or options.keys() - STREAM_OPTIONS:
        raise _wrong("stream_options", '{"include_usage": true}', options)
    if options.get("continuous_usage_stats"):
        raise _wrong("stream_options.continuous_usage_stats", "false, which is all that is served", True)
    n = given.get("n", 1)
    if not is_integer(n) or n < 1:
        raise _wrong("n", "an integer, at least 1", n)
    max_tokens = _max_tokens(given, is_chat)
    sampling = {"temperature": 1.0} | {name: given[name] for name in SAMPLING if name in given}
    return Question(
        prompts=[] if is_chat else _prompts(given.get("prompt")),
        messages=read_messages(given.get("messages")) if is_chat else [],
        params=SamplingParams(**sampling, max_tokens=max_tokens or 1, logprobs=_logprobs(given, is_chat)),
        max_tokens=max_tokens,
        n=n,
        stream=_truth(given, "stream"),
        include_usage=_truth(options, "include_usage"),
        return_steps=_truth(given, "return_steps"),
    )


def _check_names(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name in OURS or name in SAMPLING or name in IGNORED:
            continue
        if name not in NEUTRAL:
            raise RequestError(f"{name}: expected no such field, which this server does not know, found it")
        if not any(type(value) is type(other) and value == other for other in NEUTRAL[name]):
            shown = " or ".join(repr(other) for other in NEUTRAL[name])
            raise _wrong(name, f"{shown} or nothing, because nothing else is served", value)


def _max_tokens(given: dict[str, Any], is_chat: bool) -> int | None:
    value = given.get("max_completion_tokens", given.get("max_tokens"))
    if value is None:
        return None if is_chat else DEFAULT_MAX_TOKENS
    if not is_integer(value) or value < 1:
        raise _wrong("max_tokens", "an integer, at least 1", value)
    return int(value)


def _logprobs(given: dict[str, Any], is_chat: bool) -> bool:
    """Whether the tokens' own log probabilities are wanted; those of others are not known."""
    value, top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if is_chat and not isinstance(value, bool):
        raise _wrong("logprobs", "true or false", value)
    if not is_chat and value is not False and not is_integer(value):
        raise _wrong("logprobs", "an integer", value)
    name, number = ("top_logprobs", top) if is_chat or "top_logprobs" in given else ("logprobs", value)
    if not is_integer(number) and number is not False:
        raise _wrong(name, "an integer", number)
    if number != 0:
        raise _wrong(name, "0, because only the log probability of the chosen token is served", number)
    return value is not False


def _prompts(value: object) -> list[Prompt]:
    expected = "a text, a list of token ids, or a list of either"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", expected, value)
    if all(is_integer(token) for token in value):
        return [value]
    if not all(isinstance(prompt, str) for prompt in value) and not all(
        isinstance(prompt, list) and all(is_integer(token) for token in prompt) for prompt in value
    ):
        raise _wrong("prompt", expected, value)
    return list(value)


def read_messages(value: object) -> list[dict[str, Any]]:
    """Messages whose content is a text: parts of text are joined, parts of anything else refused."""
    if not isinstance(value, list) or not value:
        raise _wrong("messages", "a list of messages", value)
    messages = []
    for message in value:
        if not isinstance(message, dict):
            raise _wrong("messages", "messages with a role and a content", message)
        content = message.get("content")
        if isinstance(content, list):
            message = message | {"content": "".join(_part_text(part) for part in content)}
        messages.append(message)
    return messages


def _part_text(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise _wrong("messages", 'content parts {"type": "text", "text": ...}, which are all that is served', part)
    return str(part["text"])


def _truth(given: dict[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _wrong(name: str, expected: str, found: object) -> RequestError:
    shown = repr(found)
    return RequestError(f"{name}: expected {expected}, found {shown if len(shown) <= 80 else f'{shown[:77]}...'}")
