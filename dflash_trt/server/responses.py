# SPDX-License-Identifier: Apache-2.0
"""Responses in the shapes of the OpenAI API, with vLLM's stop_reason and metrics."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_trt.runtime.acceptance import Acceptance
from dflash_trt.runtime.backend import Chunk
from dflash_trt.runtime.completion import Completion
from dflash_trt.server.channels import Channels, ChannelTokens
from dflash_trt.server.requests import CompletionRequest
from dflash_trt.server.step_texts import StepTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]


class Choice:
    """One entry of a response's `choices`."""

    def __init__(self, index: int, request: CompletionRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        self.index = index
        self.completion: Completion | None = None
        self._request = request
        self._tokenizer = tokenizer
        tokens = ChannelTokens.read(tokenizer) if request.is_chat else None
        self._channels = None if tokens is None else Channels(tokens, tokenizer, request.params.stop_texts)
        self._step_texts = StepTexts(tokenizer) if request.return_steps else None
        self._offset = 0
        self._is_first = True

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning channel."""
        return self._channels.num_reasoning_tokens if self._channels else 0

    def add(self, chunk: Chunk, *, is_delta: bool) -> Json:
        """The choice of a streamed event, which has what the chunk adds, or of a whole response."""
        self.completion = chunk.completion
        choice: Json = {"index": self.index}
        if self._request.is_chat:
            choice["delta" if is_delta else "message"] = self._message(chunk, is_delta)
        else:
            choice["text"] = chunk.text
        choice["logprobs"] = self._logprobs(chunk)
        choice["finish_reason"] = chunk.completion and chunk.completion.finish_reason
        choice["stop_reason"] = chunk.completion and chunk.completion.stop_reason
        if self._step_texts is not None:
            choice["steps"] = self._step_texts.read(chunk)
        return choice

    def _message(self, chunk: Chunk, is_delta: bool) -> Json:
        """A message or its delta; only the first delta has the role."""
        message: Json = {"role": "assistant"} if self._is_first else {}
        self._is_first = False
        if self._channels is None:
            return message | ({"content": chunk.text} if chunk.text or not is_delta else {})
        reasoning, content = self._channels.push(chunk.token_ids, is_last=chunk.completion is not None)
        if content or not is_delta:
            message["content"] = content
        if reasoning or not is_delta:  # vLLM's name since 0.11, and the older one
            message |= {"reasoning": reasoning or None, "reasoning_content": reasoning or None}
        return message

    def _logprobs(self, chunk: Chunk) -> Json | None:
        if chunk.logprobs is None:
            return None
        tokens = [str(self._tokenizer.decode([token])) for token in chunk.token_ids]
        if self._request.is_chat:
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


def has_content(delta: Json) -> bool:
    """Whether a streamed choice is worth an event."""
    content = delta.get("text") or delta.get("delta") or delta["finish_reason"] or delta.get("steps")
    return bool(content) or delta["logprobs"] is not None


class Envelope:
    """The fields that all documents of one response share."""

    def __init__(self, request: CompletionRequest, model: str, num_draft_tokens: int) -> None:
        kind = "chat.completion" if request.is_chat else "text_completion"
        self._is_single = request.n == 1 and len(request.prompts) <= 1
        self._num_draft_tokens = num_draft_tokens
        self._common = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if request.is_chat and request.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def wrap(self, choices: Sequence[Json], **extra: object) -> Json:
        """A document with these choices."""
        return {**self._common, "choices": choices, **extra}

    def metrics(self, choices: Sequence[Choice]) -> Json | None:
        """vLLM's `metrics`, of requests with one sequence only."""
        completion = choices[0].completion
        return (
            completion_metrics(completion, self._num_draft_tokens)
            if self._is_single and completion is not None
            else None
        )


def usage(num_prompt_tokens: int, choices: Sequence[Choice]) -> Json:
    """Tokens of all prompts, each counted once, and of all sequences."""
    num_generated = sum(len(choice.completion.token_ids) for choice in choices if choice.completion is not None)
    counts: Json = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt_tokens + num_generated,
    }
    if num_reasoning := sum(choice.num_reasoning_tokens for choice in choices):
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return counts


def completion_metrics(completion: Completion, num_draft_tokens: int) -> Json:
    """What one sequence came to, in vLLM's words."""
    ttft, queue, itl = completion.ttft_seconds, completion.queue_seconds, completion.itl_seconds
    generation = None if ttft is None else completion.seconds - ttft
    after_first = len(completion.token_ids) - 1
    return {
        "time_to_first_token_ms": None if ttft is None or queue is None else 1000 * (ttft - queue),
        "generation_time_ms": _ms(generation),
        "queue_time_ms": _ms(queue),
        "mean_itl_ms": _ms(itl),
        "tokens_per_second": after_first / generation if generation and after_first > 0 else None,
        "speculative_decoding": None
        if completion.acceptance is None
        else _speculative_decoding(completion.acceptance, num_draft_tokens),
    }


def _speculative_decoding(acceptance: Acceptance, num_draft_tokens: int) -> Json:
    """As vLLM counts: passes that verified drafts; index j of the histogram are those that accepted exactly j."""
    at_least = [acceptance.drafting_passes, *acceptance.accepted_by_position]
    at_least += [0] * (num_draft_tokens + 2 - len(at_least))
    return {
        "mean_acceptance_length": acceptance.tau_of_drafting_passes,
        "draft_acceptance_rate": acceptance.accepted / acceptance.proposed if acceptance.proposed else None,
        "acceptance_histogram": [at_least[j] - at_least[j + 1] for j in range(num_draft_tokens + 1)],
        "num_spec_steps": acceptance.drafting_passes,
        "num_accepted_draft_tokens": acceptance.accepted,
        "num_draft_tokens": acceptance.proposed,
        "num_spec_tokens": num_draft_tokens,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
