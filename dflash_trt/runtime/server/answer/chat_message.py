# SPDX-License-Identifier: Apache-2.0
"""Builds the message of a chat's answer from its chunks: content, reasoning and tool calls."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from msgspec import UNSET

from dflash_trt.api.backend import Chunk
from dflash_trt.runtime.server.answer.bodies import ChatMessage, FunctionCall, ToolCall
from dflash_trt.runtime.server.calls.channels import Channels, ChannelTokens
from dflash_trt.runtime.server.calls.hermes import CallDelta
from dflash_trt.runtime.server.calls.tools import call_parser
from dflash_trt.runtime.server.request.generation_request import GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class MessageBuilder:
    """Chunks in, messages or their deltas out."""

    def __init__(self, request: GenerationRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        tokens, has_tools, params = ChannelTokens.read(tokenizer), request.tools is not None, request.params
        self._channels = (
            None
            if tokens is None
            else Channels(tokens, tokenizer, params.stop_texts, params.min_tokens, has_tools=has_tools)
        )
        self._hermes = None
        if request.tools is not None and tokens is None:
            self._hermes = call_parser(request.tool_format, request.tools.definitions)
        self._takes_one_call = request.tools is not None and not request.tools.parallel
        self._num_calls = 0
        self._is_first = True

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning channel."""
        return self._channels.num_reasoning_tokens if self._channels else 0

    @property
    def has_whole_calls(self) -> bool:
        """Whether functions were called, and the answer did not end inside a call."""
        parser = self._channels or self._hermes
        return self._num_calls > 0 and not (parser is not None and parser.has_open_call)

    def add(self, chunk: Chunk, *, is_delta: bool) -> ChatMessage:
        """The whole message, or what the chunk adds to it; only the first delta has the role."""
        is_last = chunk.completion is not None
        reasoning, content = "", chunk.text
        calls: list[CallDelta] = []
        if self._channels is not None:
            reasoning, content, calls = self._channels.push(chunk.token_ids, is_last=is_last)
        elif self._hermes is not None:
            content, calls = self._hermes.push(chunk.text, is_last=is_last)
        message = ChatMessage(role="assistant" if self._is_first else UNSET)
        self._is_first = False
        tool_calls = self._tool_calls(calls, is_delta=is_delta) if calls else []
        if tool_calls:
            message.tool_calls = tool_calls
        if content or not is_delta:
            message.content = content or (None if tool_calls else "")
        if self._channels is not None and (reasoning or not is_delta):
            message.reasoning = message.reasoning_content = reasoning or None
        return message

    def _tool_calls(self, deltas: list[CallDelta], *, is_delta: bool) -> list[ToolCall]:
        """Deltas of each call; of the first one alone where calls may not be parallel."""
        calls: dict[int, ToolCall] = {}
        for delta in deltas:
            self._num_calls += delta.name is not None
            if self._num_calls > 1 and self._takes_one_call:
                break
            index = self._num_calls - 1
            if index not in calls:
                calls[index] = ToolCall(index=index if is_delta else UNSET, function=FunctionCall(arguments=""))
            call = calls[index]
            if delta.name is not None:
                call.id, call.type, call.function.name = f"call_{uuid.uuid4().hex}", "function", delta.name
            call.function.arguments += delta.arguments
        return list(calls.values())
