# SPDX-License-Identifier: Apache-2.0
"""Parses request bodies of the OpenAI API; unsupported fields are rejected by name."""

from __future__ import annotations

import re
from typing import Any, cast

import msgspec

from dflash_trt.api.backend import Prompt
from dflash_trt.api.chat_template import join_parts
from dflash_trt.api.neutral_fields import ANY, IGNORED, NEUTRAL_VALUES, check_neutral
from dflash_trt.api.sampling_params import (
    MAX_TOP_LOGPROBS,
    OPENAI_TEMPERATURE,
    SAMPLER_FIELDS,
    Grammar,
    SamplingParams,
    is_integer,
)
from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.server.grammars import read_grammar
from dflash_trt.runtime.server.http_error import HttpError
from dflash_trt.runtime.server.limits import decode_object
from dflash_trt.runtime.server.tools import ToolFormat, Tools, call_grammar, read_tools

SAMPLING_FIELDS = (*SAMPLER_FIELDS, "min_tokens", "stop", "stop_token_ids", "ignore_eos", "draft_length")
OTHER_FIELDS = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "logprobs",
    "top_logprobs", "return_steps", "echo", "logit_bias", "response_format", "structured_outputs",
    "return_tokens_as_token_ids", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort",
    "chat_template_kwargs",
}  # fmt: skip
MAX_ITEMS = {"stop": 64, "stop_token_ids": 1024, "logit_bias": 1024, "chat_template_kwargs": 64}
MAX_STOP_CHARACTERS = 1024
MAX_ARGUMENT_CHARACTERS = 2**21
"""Characters of all tool calls of a conversation, which are JSON in JSON."""
TOKEN_ID = re.compile(r"[0-9]{1,9}")
STREAM_OPTIONS = {"include_usage", "include_obfuscation", "continuous_usage_stats"}
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request."""

    prompts: list[Prompt]
    """Prompts of a completion; empty in a chat."""
    messages: list[dict[str, Any]]
    """Messages of a chat; empty in a completion."""
    params: SamplingParams
    """Sampling parameters without max_tokens, which may depend on the length of the prompt."""
    max_tokens: int | None
    """Maximum number of tokens to generate; None: as many as fit, up to DEFAULT_CHAT_TOKENS."""
    n: int
    stream: bool
    include_usage: bool
    """Whether a stream ends with the usage of all sequences."""
    continuous_usage: bool
    """Whether each event has the usage so far of its sequence, as in vLLM."""
    ignored: list[str]
    """Given fields without effect that their sender should know of."""
    return_steps: bool
    tools: Tools | None
    template_kwargs: dict[str, Any]
    """Variables of the chat template."""
    echo: bool
    """Whether the text begins with the prompt."""
    return_tokens_as_token_ids: bool
    """Whether log probabilities name tokens by "token_id:5"."""

    @property
    def is_chat(self) -> bool:
        """Whether it has messages."""
        return bool(self.messages)


def parse_request(
    body: dict[str, Any], model: str, max_length: int, tool_format: ToolFormat | None, *, is_chat: bool
) -> CompletionRequest:
    """Parses a request for a model with prompts of at most `max_length` tokens and tool calls in `tool_format`.

    Raises RequestError for an invalid or unsupported field, HttpError 404 for another model.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    if (other := "prompt" if is_chat else "messages") in fields:
        raise RequestError(f"{other}: unknown field of a {'chat' if is_chat else 'completion'}")
    if "stream_options" in fields and fields.get("stream") is not True:
        raise _invalid("stream_options", "a request with stream: true", fields["stream_options"])
    _check_names(fields, is_chat)
    if fields.get("model", model) != model:
        raise HttpError(404, f"model: expected {model}, found {fields['model']!r}", code="model_not_found")
    options = fields.pop("stream_options", {})
    if not isinstance(options, dict) or options.keys() - STREAM_OPTIONS:
        raise _invalid("stream_options", '{"include_usage": true}', options)
    n = fields.get("n", 1)
    if not is_integer(n) or n < 1:
        raise _invalid("n", "an integer, at least 1", n)
    echo = _boolean(fields, "echo")
    if is_chat and echo:
        raise _invalid("echo", "false in a chat", echo)
    max_tokens = _max_tokens(fields, is_chat, lowest=0 if echo else 1)
    _check_sizes(fields)
    grammar, tools = read_grammar(fields), read_tools(fields)
    if tools is not None:
        tools, grammar = _check_tools(tools, grammar, tool_format, is_chat)
    logprobs, top_logprobs = _logprobs(fields, is_chat)
    sampling = {"temperature": OPENAI_TEMPERATURE} | {name: fields[name] for name in SAMPLING_FIELDS if name in fields}
    return CompletionRequest(
        prompts=[] if is_chat else _prompts(fields.get("prompt"), max_length),
        messages=read_messages(fields.get("messages")) if is_chat else [],
        params=SamplingParams(
            **sampling,
            max_tokens=max_tokens or 1,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            prompt_logprobs=echo and logprobs,
            logit_bias=_logit_bias(fields.get("logit_bias")),
            structured_outputs=grammar,
        ),
        max_tokens=max_tokens,
        n=n,
        stream=_boolean(fields, "stream"),
        include_usage=_boolean(options, "include_usage"),
        continuous_usage=_boolean(options, "continuous_usage_stats") and _boolean(options, "include_usage"),
        ignored=[name for name in IGNORED if name in fields],
        return_steps=_boolean(fields, "return_steps"),
        tools=tools,
        template_kwargs=_template_kwargs(fields),
        echo=echo,
        return_tokens_as_token_ids=_boolean(fields, "return_tokens_as_token_ids"),
    )


def _check_names(fields: dict[str, Any], is_chat: bool) -> None:
    for name, value in fields.items():
        if name in OTHER_FIELDS or name in SAMPLING_FIELDS or name in IGNORED:
            continue
        if name.startswith("guided_"):
            raise RequestError(f"{name}: expected structured_outputs, its name since vLLM 0.12, found the old one")
        if name not in NEUTRAL_VALUES:
            raise RequestError(f"{name}: unknown field")
        # A chat template has written the special tokens of a chat.
        check_neutral(name, value, (not is_chat,) if name == "add_special_tokens" else ANY)


def _check_tools(
    tools: Tools, grammar: Grammar | None, tool_format: ToolFormat | None, is_chat: bool
) -> tuple[Tools, Grammar | None]:
    """Returns the tools, and the grammar of an answer that must call one."""
    if not is_chat:
        raise RequestError("tools: unknown field of a completion")
    if tool_format is None:
        raise RequestError("tools: expected a chat template with Hermes's or harmony's tool calls, found another")
    if grammar is not None:
        raise RequestError(f"{grammar.field}: expected none together with tools, found both")
    return tools, call_grammar(tools, tool_format) if tools.required else None


def _template_kwargs(fields: dict[str, Any]) -> dict[str, Any]:
    """Variables of the chat template; as in vLLM, reasoning_effort also sets enable_thinking."""
    given, effort = fields.get("chat_template_kwargs", {}), fields.get("reasoning_effort")
    if not isinstance(given, dict):
        raise _invalid("chat_template_kwargs", "an object", given)
    if effort is None:
        return given
    if effort not in REASONING_EFFORTS:
        raise _invalid("reasoning_effort", f"one of {', '.join(REASONING_EFFORTS)}", effort)
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **given}


def _check_sizes(fields: dict[str, Any]) -> None:
    """Bounds the lists that each step of a request searches."""
    for name, limit in MAX_ITEMS.items():
        if isinstance(value := fields.get(name), list | dict) and len(value) > limit:
            raise RequestError(f"{name}: expected at most {limit} items, found {len(value)}")
    stop = fields.get("stop")
    texts = stop if isinstance(stop, list) else [stop]
    if any(isinstance(text, str) and len(text) > MAX_STOP_CHARACTERS for text in texts):
        raise RequestError(f"stop: expected at most {MAX_STOP_CHARACTERS} characters, found more")


def _max_tokens(fields: dict[str, Any], is_chat: bool, lowest: int) -> int | None:
    value = fields.get("max_completion_tokens", fields.get("max_tokens"))
    if value is None:
        return None if is_chat else DEFAULT_MAX_TOKENS
    if not is_integer(value) or value < lowest:
        raise _invalid("max_tokens", f"an integer, at least {lowest}", value)
    return int(value)


def _logprobs(fields: dict[str, Any], is_chat: bool) -> tuple[bool, int]:
    """Whether log probabilities of the sampled tokens are requested, and for how many other tokens."""
    value, top = fields.get("logprobs", False), fields.get("top_logprobs", 0)
    if is_chat:
        if not isinstance(value, bool):
            raise _invalid("logprobs", "true or false", value)
        if not value and top != 0:
            raise _invalid("top_logprobs", "none without logprobs: true", top)
        return value, top
    if "top_logprobs" in fields and top != 0:
        raise _invalid("top_logprobs", "none in a completion, where logprobs says it", top)
    if value is not False and not (is_integer(value) and 0 <= value <= MAX_TOP_LOGPROBS):
        raise _invalid("logprobs", f"an integer, 0 to {MAX_TOP_LOGPROBS}", value)
    return value is not False, int(value)


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(TOKEN_ID.fullmatch(key) for key in value):
        raise _invalid("logit_bias", "a bias of -100 to 100 for each token id", value)
    return {int(key): bias for key, bias in value.items()}


def _prompts(value: object, max_length: int) -> list[Prompt]:
    expected = "a text, a list of token ids, or a list of either"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _invalid("prompt", expected, value)
    if (longest := max([len(value), *(len(prompt) for prompt in value if isinstance(prompt, list))])) > max_length:
        raise RequestError(f"prompt: expected at most {max_length} tokens, found {longest}")
    if all(is_integer(token) for token in value):
        return [value]
    if not all(isinstance(prompt, str) for prompt in value) and not all(
        isinstance(prompt, list) and all(is_integer(token) for token in prompt) for prompt in value
    ):
        raise _invalid("prompt", expected, value)
    return list(value)


def read_messages(value: object) -> list[dict[str, Any]]:
    """Checks messages and joins their text parts; RequestError for other parts."""
    if not isinstance(value, list) or not value:
        raise _invalid("messages", "a list of messages", value)
    messages = []
    num_characters = 0
    for message in value:
        if not isinstance(message, dict):
            raise _invalid("messages", "messages with a role and a content", message)
        message = cast("dict[str, Any]", join_parts(message))
        if isinstance(calls := message.get("tool_calls"), list):
            num_characters += sum(map(_argument_characters, calls))
            if num_characters > MAX_ARGUMENT_CHARACTERS:
                limit = MAX_ARGUMENT_CHARACTERS
                raise RequestError(f"messages: expected at most {limit} characters of arguments, found more")
            message = message | {"tool_calls": [_tool_call(call) for call in calls]}
            message["content"] = message.get("content") or ""
        messages.append(message)
    return messages


def _argument_characters(call: object) -> int:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return len(arguments) if isinstance(arguments, str) else 0


def _tool_call(call: object) -> object:
    """A call with its arguments as an object, which is what templates expect."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call  # left to the template
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = decode_object(arguments or "{}", "messages[].tool_calls[].function.arguments")
    return call | {"function": function | {"arguments": arguments}}


def _boolean(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise _invalid(name, "true or false", value)
    return value


def _invalid(name: str, expected: str, found: object) -> RequestError:
    return RequestError(f"{name}: expected {expected}, found {shown(found)}")
