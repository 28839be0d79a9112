# SPDX-License-Identifier: Apache-2.0
"""Answers in the shapes of the OpenAI API, with what vLLM adds: stop_reason, and metrics."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_trt.runtime.acceptance import Acceptance
from dflash_trt.runtime.backend import Chunk
from dflash_trt.runtime.completion import Completion
from dflash_trt.server.channels import Channels, ChannelTokens
from dflash_trt.server.questions import Question
from dflash_trt.server.step_texts import StepTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]


class Choice:
    """One of a request's answers, as it grows."""

    def __init__(self, index: int, question: Question, tokenizer: PreTrainedTokenizerBase) -> None:
        self.index = index
        self.completion: Completion | None = None
        self._question = question
        self._tokenizer = tokenizer
        tokens = ChannelTokens.read(tokenizer) if question.is_chat else None
        self._channels = None if tokens is None else Channels(tokens, tokenizer, question.params.stop_texts)
        self._steps = StepTexts(tokenizer) if question.return_steps else None
        self._offset = 0
        self._is_new = True

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens that were thought, not said."""
        return self._channels.num_reasoning_tokens if self._channels else 0

    def add(self, chunk: Chunk, *, whole: bool) -> Json:
        """What a chunk adds, as a choice of a streamed answer, or of a `whole` one."""
        self.completion = chunk.completion
        choice: Json = {"index": self.index}
        if self._question.is_chat:
            choice["message" if whole else "delta"] = self._message(chunk, whole)
        else:
            choice["text"] = chunk.text
        choice["logprobs"] = self._logprobs(chunk)
        choice["finish_reason"] = chunk.completion and chunk.completion.finish_reason
        choice["stop_reason"] = chunk.completion and chunk.completion.stop_reason
        if self._steps is not None:
            choice["steps"] = self._steps.read(chunk)
        return choice

    def _message(self, chunk: Chunk, whole: bool) -> Json:
        """A message, or what is added to it; only its first part has the role."""
        message: Json = {"role": "assistant"} if self._is_new else {}
        self._is_new = False
        if self._channels is None:
            return message | ({"content": chunk.text} if whole or chunk.text else {})
        thought, said = self._channels.push(chunk.token_ids, is_last=chunk.completion is not None)
        if whole or said:
            message["content"] = said
        if whole or thought:  # vLLM's name since 0.11, and everybody's older one
            message |= {"reasoning": thought or None, "reasoning_content": thought or None}
        return message

    def _logprobs(self, chunk: Chunk) -> Json | None:
        if chunk.logprobs is None:
            return None
        tokens = [str(self._tokenizer.decode([token])) for token in chunk.token_ids]
        if self._question.is_chat:
            pairs = zip(tokens, chunk.logprobs, strict=True)
            return {
                "content": [
                    {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                    for token, value in pairs
                ]
            }
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {"tokens": tokens, "token_logprobs": chunk.logprobs, "top_logprobs": None, "text_offset": offsets}


def has_news(part: Json) -> bool:
    """Whether a choice of a streamed answer says anything."""
    said = part.get("text") or part.get("delta") or part["finish_reason"] or part.get("steps")
    return bool(said) or part["logprobs"] is not None


class Envelope:
    """What all parts of one answer have in common."""

    def __init__(self, question: Question, model: str, num_draft_tokens: int) -> None:
        kind = "chat.completion" if question.is_chat else "text_completion"
        self._is_single = question.n == 1 and len(question.prompts) <= 1
        self._num_draft_tokens = num_draft_tokens
        self._common = {
            "id": f"{'chatcmpl' if question.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if question.is_chat and question.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def wrap(self, choices: Sequence[Json], **more: object) -> Json:
        """Choices in it."""
        return {**self._common, "choices": choices, **more}

    def metrics(self, choices: Sequence[Choice]) -> Json | None:
        """vLLM's `metrics`: of requests with one answer only."""
        answer = choices[0].completion
        return _metrics(answer, self._num_draft_tokens) if self._is_single and answer is not None else None


def usage(num_prompt_tokens: int, choices: Sequence[Choice]) -> Json:
    """Tokens of all prompts, each once, and of all answers."""
    answered = sum(len(choice.completion.token_ids) for choice in choices if choice.completion is not None)
    counts: Json = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": answered,
        "total_tokens": num_prompt_tokens + answered,
    }
    if thought := sum(choice.num_reasoning_tokens for choice in choices):
        counts["completion_tokens_details"] = {"reasoning_tokens": thought}
    return counts


def _metrics(answer: Completion, num_draft_tokens: int) -> Json:
    ttft, queue, itl = answer.ttft_seconds, answer.queue_seconds, answer.itl_seconds
    generation = None if ttft is None else answer.seconds - ttft
    after_first = len(answer.token_ids) - 1
    return {
        "time_to_first_token_ms": None if ttft is None or queue is None else 1000 * (ttft - queue),
        "generation_time_ms": _ms(generation),
        "queue_time_ms": _ms(queue),
        "mean_itl_ms": _ms(itl),
        "tokens_per_second": after_first / generation if generation and after_first > 0 else None,
        "speculative_decoding": None
        if answer.acceptance is None
        else _speculative_decoding(answer.acceptance, num_draft_tokens),
    }


def _speculative_decoding(found: Acceptance, num_draft_tokens: int) -> Json:
    """As vLLM counts: passes that verified drafts; index j of the histogram are those that accepted exactly j."""
    at_least = [found.drafting_passes, *found.accepted_by_position]
    at_least += [0] * (num_draft_tokens + 2 - len(at_least))
    return {
        "mean_acceptance_length": found.tau_of_drafting_passes,
        "draft_acceptance_rate": found.accepted / found.proposed if found.proposed else None,
        "acceptance_histogram": [at_least[j] - at_least[j + 1] for j in range(num_draft_tokens + 1)],
        "num_spec_steps": found.drafting_passes,
        "num_accepted_draft_tokens": found.accepted,
        "num_draft_tokens": found.proposed,
        "num_spec_tokens": num_draft_tokens,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
