# SPDX-License-Identifier: Apache-2.0
"""One entry of an answer's `choices`, built from the chunks of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import Completion
from dflash_trt.runtime.server.answer.answer_logprobs import TokenTexts, chat_logprobs, completion_logprobs
from dflash_trt.runtime.server.answer.bodies import ChatChoice, ChatMessage, CompletionLogprobs, TextChoice
from dflash_trt.runtime.server.answer.chat_message import MessageBuilder
from dflash_trt.runtime.server.answer.step_texts import StepTexts
from dflash_trt.runtime.server.request.generation_request import GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOTHING = ChatMessage()


class Choice:
    """Chunks in, choices or their deltas out."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        prompt_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase,
        token_texts: TokenTexts,
    ) -> None:
        self.index = index
        self.num_generated_tokens = 0
        """Tokens of the completion so far; 0 where only the prompt is echoed."""
        self.completion: Completion | None = None
        self._request = request
        self._prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self._token_texts = token_texts
        self._message = MessageBuilder(request, tokenizer) if request.is_chat else None
        self._step_texts = StepTexts(tokenizer) if request.body.return_steps else None
        self._offset = 0
        self._is_first = True

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning channel."""
        return 0 if self._message is None else self._message.num_reasoning_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of the prompt, counted for the first answer to it only."""
        if self.completion is None or self.index % self._request.body.n:
            return 0
        return self.completion.num_cached_tokens or 0

    def add(self, chunk: Chunk, *, is_delta: bool) -> TextChoice | ChatChoice:
        """The choice of a whole response, or of an event with what the chunk adds."""
        self.completion = chunk.completion
        if self._request.max_tokens == 0:
            chunk = msgspec.structs.replace(
                chunk, text="", token_ids=[], logprobs=chunk.logprobs and [], top_logprobs=None
            )
        self.num_generated_tokens += len(chunk.token_ids)
        choice = self._text(chunk) if self._message is None else self._chat(self._message, chunk, is_delta)
        if self._step_texts is not None:
            choice.steps = self._step_texts.read(chunk)
        return choice

    def _chat(self, builder: MessageBuilder, chunk: Chunk, is_delta: bool) -> ChatChoice:
        message, logprobs = builder.add(chunk, is_delta=is_delta), None
        if chunk.logprobs is not None:
            logprobs = chat_logprobs(self._token_name, chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
        finish_reason, stop_reason = _reasons(chunk)
        if finish_reason == "stop" and builder.has_whole_calls:
            finish_reason = "tool_calls"
        choice = ChatChoice(index=self.index, logprobs=logprobs, finish_reason=finish_reason, stop_reason=stop_reason)
        if is_delta:
            choice.delta = message
        else:
            choice.message = message
        return choice

    def _text(self, chunk: Chunk) -> TextChoice:
        text = self._prompt_text() + chunk.text if self._request.echo and self._is_first else chunk.text
        self._is_first = False
        finish_reason, stop_reason = _reasons(chunk)
        return TextChoice(
            index=self.index,
            text=text,
            logprobs=None if chunk.logprobs is None else self._logprobs(chunk, chunk.logprobs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _prompt_text(self) -> str:
        prompt = self._request.prompts[self.index // self._request.body.n]
        return prompt if isinstance(prompt, str) else str(self._tokenizer.decode(list(prompt)))

    def _logprobs(self, chunk: Chunk, logprobs: Sequence[float | None]) -> CompletionLogprobs:
        token_ids = chunk.token_ids
        top: Sequence[dict[int, float] | None] | None = chunk.top_logprobs
        if (prompt := chunk.prompt_logprobs) is not None:
            token_ids = [*self._prompt_ids, *token_ids]
            logprobs = [None, *prompt.logprobs, *logprobs]
            top = None if prompt.top_logprobs is None else [None, *prompt.top_logprobs, *(top or [])]
        shaped = completion_logprobs(self._token_name, token_ids, logprobs, top, self._offset)
        self._offset += sum(map(len, shaped.tokens))
        return shaped

    def _token_name(self, token: int) -> str:
        return f"token_id:{token}" if self._request.body.return_tokens_as_token_ids else self._token_texts[token]


def has_content(choice: TextChoice | ChatChoice) -> bool:
    """Whether a streamed choice needs an event."""
    added = choice.text if isinstance(choice, TextChoice) else choice.delta != NOTHING
    return bool(added or choice.finish_reason or choice.steps) or choice.logprobs is not None


def _reasons(chunk: Chunk) -> tuple[str | None, int | str | None]:
    """finish_reason and stop_reason."""
    ended = chunk.completion
    return (None, None) if ended is None else (ended.finish_reason, ended.stop_reason)
