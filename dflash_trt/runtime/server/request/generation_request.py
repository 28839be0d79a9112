# SPDX-License-Identifier: Apache-2.0
"""Turns the body of a completion or chat into what is generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dflash_trt.api.backend import Prompt
from dflash_trt.api.neutral_fields import ANY, IGNORED, NEUTRAL_VALUES
from dflash_trt.api.sampling_params import MAX_TOP_LOGPROBS, SAMPLER_FIELDS, SamplingParams
from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.server.calls.tools import ToolFormat, Tools, call_grammar, read_tools
from dflash_trt.runtime.server.http_error import HttpError
from dflash_trt.runtime.server.request.decoding import decode_fields
from dflash_trt.runtime.server.request.grammar_fields import read_grammar
from dflash_trt.runtime.server.request.messages import read_messages
from dflash_trt.runtime.server.request.request_fields import REASONING_EFFORTS, ChatBody, CompletionBody, StreamOptions

SAMPLING_FIELDS = (*SAMPLER_FIELDS, "min_tokens", "stop", "stop_token_ids", "ignore_eos", "draft_length", "logit_bias")
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""
CHATS = NEUTRAL_VALUES | dict.fromkeys(IGNORED) | {"add_special_tokens": (False,), "echo": (False,)}
"""Values of unsupported fields that change nothing in a chat, whose template has written the special tokens."""
COMPLETIONS = NEUTRAL_VALUES | dict.fromkeys(IGNORED) | {
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": ANY, "top_logprobs": (0,),
    "reasoning_effort": ANY, "chat_template_kwargs": ANY,
}  # fmt: skip
"""Values of unsupported fields that change nothing in a completion."""
TOKENIZE: dict[str, tuple[object, ...] | None] = {"add_generation_prompt": (True,), "return_token_strs": (False,)}
"""Values of unsupported fields that change nothing in a request to /tokenize."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: prompts, parameters and the form of the answer."""

    body: CompletionBody | ChatBody
    prompts: list[Prompt]
    """Prompts of a completion; empty in a chat."""
    messages: list[dict[str, Any]]
    """Messages of a chat; empty in a completion."""
    params: SamplingParams
    """Sampling parameters without max_tokens, which may depend on the length of the prompt."""
    max_tokens: int | None
    """Maximum number of tokens to generate; None: what fits, up to DEFAULT_CHAT_TOKENS."""
    stream_options: StreamOptions
    ignored: list[str]
    """Given fields without effect that their sender should know of."""
    tools: Tools | None
    tool_format: ToolFormat | None
    template_kwargs: dict[str, Any]
    """Variables of the chat template."""
    echo: bool
    """Whether the text begins with the prompt."""

    @property
    def is_chat(self) -> bool:
        """Whether it has messages."""
        return bool(self.messages)


def parse_request(
    fields: Mapping[str, Any], model: str, max_length: int, tool_format: ToolFormat | None, *, is_chat: bool
) -> GenerationRequest:
    """Parses a request for a model with prompts of at most `max_length` tokens and tool calls in `tool_format`.

    Raises RequestError for an invalid or unsupported field, HttpError 404 for another model.
    """
    body: CompletionBody | ChatBody
    if is_chat:
        body = chat = decode_fields(fields, ChatBody, CHATS)
        completion = None
    else:
        body = completion = decode_fields(fields, CompletionBody, COMPLETIONS)
        chat = None
    check_model(body.model, model)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: it needs stream: true")
    echo = completion is not None and completion.echo
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens == 0 and not echo:
        raise RequestError("max_tokens: expected at least 1, found 0")
    if max_tokens is None and not is_chat:
        max_tokens = DEFAULT_MAX_TOKENS
    grammar = read_grammar(body.response_format, body.structured_outputs)
    tools = None
    if chat is not None and (tools := read_tools(chat)) is not None:
        if tool_format == "dsml":
            raise RequestError("tools: calls in DSML, the format of DeepSeek-V3.2 and V4, are not supported")
        if tool_format is None:
            raise RequestError(
                "tools: the target's chat template writes calls in none of the formats of Hermes, Qwen3-Coder, GLM,"
                " DeepSeek and harmony"
            )
        if grammar is not None:
            raise RequestError(f"{grammar.field}: it cannot be combined with tools")
        grammar = call_grammar(tools, tool_format)
    has_logprobs, top_logprobs = _logprobs(body)
    return GenerationRequest(
        body=body,
        prompts=[] if completion is None else _prompts(completion.prompt, max_length),
        messages=[] if chat is None else read_messages(chat.messages, tool_format),
        params=SamplingParams(
            **{name: getattr(body, name) for name in SAMPLING_FIELDS},
            max_tokens=max_tokens or 1,
            logprobs=has_logprobs,
            top_logprobs=top_logprobs,
            prompt_logprobs=echo and has_logprobs,
            structured_outputs=grammar,
        ),
        max_tokens=max_tokens,
        stream_options=body.stream_options or StreamOptions(),
        ignored=[name for name in IGNORED if fields.get(name) is not None],
        tools=tools,
        tool_format=tool_format,
        template_kwargs={} if chat is None else _template_kwargs(chat),
        echo=echo,
    )


def check_model(given: str | None, model: str) -> None:
    """Raises HttpError 404 for another model than the served one; None is that one."""
    if given not in (None, model):
        raise HttpError(404, f"model: {given!r} is not served here, only {model}", code="model_not_found")


def _template_kwargs(body: ChatBody) -> dict[str, Any]:
    """Variables of the chat template; as in vLLM, reasoning_effort also sets enable_thinking."""
    if (effort := body.reasoning_effort) is None:
        return body.chat_template_kwargs
    if effort not in REASONING_EFFORTS:
        raise RequestError(f"reasoning_effort: {shown(effort)} is none of {', '.join(REASONING_EFFORTS)}")
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **body.chat_template_kwargs}


def _logprobs(body: CompletionBody | ChatBody) -> tuple[bool, int]:
    """Whether log probabilities of the sampled tokens are requested, and for how many other tokens."""
    if isinstance(body, CompletionBody):
        if body.logprobs is True:
            raise RequestError(f"logprobs: expected an integer, 0 to {MAX_TOP_LOGPROBS}, found true")
        return body.logprobs is not False, int(body.logprobs)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: it needs logprobs: true")
    return body.logprobs, body.top_logprobs


def _prompts(given: str | list[Any], max_length: int) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    if (longest := max([len(given), *(len(prompt) for prompt in given if isinstance(prompt, list))])) > max_length:
        raise RequestError(f"prompt: expected at most {max_length} tokens, found {longest}")
    kinds = set(map(type, given))
    if len(kinds) > 1:
        raise RequestError(f"prompt: its items are of several kinds: {shown(given)}")
    return [given] if kinds == {int} else list(given)
