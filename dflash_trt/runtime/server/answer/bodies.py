# SPDX-License-Identifier: Apache-2.0
"""The bodies of answers, in the shapes of the OpenAI API, with vLLM's stop_reason and metrics."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class TokenLogprob(Struct):
    """The log probability of a token, in a chat."""

    token: str
    logprob: float
    bytes: list[int]


class SampledLogprob(TokenLogprob):
    """The log probability of a token that was sampled, and those of the most likely ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    """Log probabilities of a chat's answer."""

    content: list[SampledLogprob]


class CompletionLogprobs(Struct):
    """Log probabilities of a completion; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class StepToken(Struct):
    """A token, with the text that it adds."""

    id: int
    text: str


class DecodingStep(Struct, kw_only=True):
    """One step: proposed, accepted and emitted tokens."""

    is_prefill: bool = False
    is_forced: bool = False
    """Whether a grammar forced the proposals."""
    proposals: list[StepToken]
    num_accepted: int
    tokens: list[StepToken]


class FunctionCall(Struct, kw_only=True):
    """The function of a call; in a stream, a later event lacks the name and adds to the arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A call; in a stream, the events of one have its index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class ChatMessage(Struct, kw_only=True):
    """The answer's message, or what an event adds to it."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    """The name of `reasoning` before vLLM 0.11."""


class Ending(Struct, kw_only=True):
    """Fields of every choice; the reasons are null until the last event."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    steps: list[DecodingStep] | UnsetType = UNSET
    """Only with return_steps."""


class TextChoice(Ending, kw_only=True):
    """One answer of a completion."""

    text: str
    logprobs: CompletionLogprobs | None


class ChatChoice(Ending, kw_only=True):
    """One answer of a chat: a message, or in a stream its delta."""

    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    logprobs: ChatLogprobs | None


class Usage(Struct, kw_only=True):
    """Token counts of all prompts, each counted once, and of all answers so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens"], int] | UnsetType = UNSET
    completion_tokens_details: dict[Literal["reasoning_tokens"], int] | UnsetType = UNSET


class SpeculativeDecoding(Struct, kw_only=True):
    """Counts of drafting passes, as in vLLM; index j of the histogram counts those that accepted exactly j."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int | None
    num_spec_tokens: int


class Metrics(Struct, kw_only=True):
    """Measurements of a request for one answer, under vLLM's names."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None


class Document(Struct, kw_only=True):
    """Fields of every answer, and of each event of a stream."""

    id: str
    created: int
    model: str
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType | None = UNSET


class Completion(Document, kw_only=True):
    """The answer to a completion."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class ChatCompletion(Document, kw_only=True):
    """The answer to a chat."""

    object: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion"
    choices: list[ChatChoice]


class Tokens(Struct):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]


class Model(Struct, kw_only=True):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dflash-trt"
    root: str | None
    """The target."""
    draft_model: str | None
    max_model_len: int
    num_spec_tokens: int
    unscaled_length: int | None


class ModelList(Struct, kw_only=True):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Version(Struct):
    """The version of dflash-trt."""

    version: str


class ErrorDescription(Struct):
    """The problem; `param` is the invalid field, if there is one."""

    message: str
    type: str
    param: str | None
    code: int | str


class Error(Struct):
    """The answer to a request that failed."""

    error: ErrorDescription
