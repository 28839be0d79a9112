# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests: every field that has an effect, with its type."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from dflash_trt.api.sampling_params import MAX_TOP_LOGPROBS, OPENAI_TEMPERATURE, SamplerSettings

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TOOL_CHOICES = ("none", "auto", "required")
TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGE = {
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}, {"type": "null"}]},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["role", "content"],
}
TOOL = {
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
LOGPROBS = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}, {"const": False}]}
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
RESPONSE_FORMAT = {"properties": {"type": {"enum": FORMATS}}, "required": ["type"]}
Message = Annotated[dict[str, Any], Meta(extra_json_schema=MESSAGE)]
Tool = Annotated[dict[str, Any], Meta(extra_json_schema=TOOL)]
Messages = Annotated[list[Message], Meta(min_length=1)]
StopText = Annotated[str, Meta(max_length=1024)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
MaxTokens = Annotated[int, Meta(ge=0)]
MAX_TOKENS_HELP = "Default: 16 in completions; in chats what fits, at most 4096. 0 only with echo."
TokenId = Annotated[int, Meta(ge=0)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Extras of a streamed answer."""

    include_usage: bool = False
    """Whether a stream ends with the usage of all sequences."""
    continuous_usage_stats: bool = False
    """Whether, with `include_usage`, each event has the usage so far of its sequence, as in vLLM."""
    include_obfuscation: bool = False
    """No effect."""


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rule that the text must match: exactly one of these, as in vLLM."""

    regex: str | None = None
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: Annotated[bool, Meta(extra_json_schema={"const": False})] = False


class GenerationBody(SamplerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of completions and chats alike."""

    model: str | None = None
    temperature: float = OPENAI_TEMPERATURE
    n: Annotated[int, Meta(ge=1)] = 1
    max_tokens: Annotated[MaxTokens | None, Meta(description=MAX_TOKENS_HELP)] = None
    max_completion_tokens: MaxTokens | None = None
    min_tokens: int = 0
    stop: StopText | Annotated[list[StopText], Meta(max_length=64)] = field(default_factory=list)
    stop_token_ids: Annotated[list[int], Meta(max_length=1024)] | int = field(default_factory=list)
    ignore_eos: bool = False
    logit_bias: Annotated[dict[int, float], Meta(max_length=1024)] | None = None
    response_format: Annotated[dict[str, Any], Meta(extra_json_schema=RESPONSE_FORMAT)] | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    draft_length: Annotated[int | None, Meta(description="Most draft tokens of a step; 0: no speculation.")] = None
    return_steps: Annotated[bool, Meta(description="Adds what each step proposed, accepted and emitted.")] = False
    return_tokens_as_token_ids: bool = False
    """Whether log probabilities name tokens by "token_id:5"."""


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    echo: bool = False
    """Whether the text begins with the prompt."""
    logprobs: Annotated[TopLogprobs | bool, Meta(extra_json_schema=LOGPROBS)] = False


class ChatBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    tools: Annotated[list[Tool], Meta(max_length=128)] = field(default_factory=list)
    tool_choice: Annotated[str, Meta(extra_json_schema={"enum": TOOL_CHOICES})] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Annotated[str, Meta(extra_json_schema={"enum": REASONING_EFFORTS})] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] = field(default_factory=dict)


class TokenizeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
