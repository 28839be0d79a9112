# SPDX-License-Identifier: Apache-2.0
"""Responses in the shapes of the OpenAI API, with vLLM's stop_reason and metrics."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dflash_trt.api.acceptance import Acceptance, Step
from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import Completion
from dflash_trt.runtime.server.channels import CallDelta, Channels, ChannelTokens, HermesParser
from dflash_trt.runtime.server.requests import GenerationRequest
from dflash_trt.runtime.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]
Top = Sequence[dict[int, float]]


class TokenTexts(dict[int, str]):
    """Text of each token, decoded once: 20 for each of 4,000 tokens held the event loop for 0.3 s, now 0.02 s."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        text = self[token] = str(self._tokenizer.decode([token]))
        return text


def chat_logprobs(
    name: Callable[[int], str], token_ids: Sequence[int], logprobs: Sequence[float], top: Top | None
) -> Json:
    """Log probabilities in the shape of chats; `name` returns a token's text."""

    def entry(token: int, logprob: float) -> Json:
        return {"token": (text := name(token)), "logprob": logprob, "bytes": list(text.encode())}

    tops: Top = top or [{}] * len(token_ids)
    return {
        "content": [
            {**entry(token, logprob), "top_logprobs": [entry(*each) for each in others.items()]}
            for token, logprob, others in zip(token_ids, logprobs, tops, strict=True)
        ]
    }


def completion_logprobs(
    name: Callable[[int], str],
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[dict[int, float] | None] | None,
    offset: int,
) -> Json:
    """Log probabilities in the shape of completions; the first text begins at character `offset`.

    The first token of a prompt has None. As in the OpenAI API, the sampled token is listed among the most likely ones.
    """
    tokens = [name(token) for token in token_ids]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    tops = None
    if top is not None:
        tops = [
            None if others is None else _by_text(name, {**others, token: logprob})
            for token, logprob, others in zip(token_ids, logprobs, top, strict=True)
        ]
    return {"tokens": tokens, "token_logprobs": list(logprobs), "top_logprobs": tops, "text_offset": offsets}


def _by_text(name: Callable[[int], str], others: dict[int, float | None]) -> dict[str, float | None]:
    """Values by text; the most likely one where tokens have the same text, as parts of characters do."""
    named: dict[str, float | None] = {}
    for token, value in others.items():
        named.setdefault(name(token), value)
    return named


class Choice:
    """One entry of a response's `choices`."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        prompt_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase,
        token_texts: TokenTexts,
    ) -> None:
        self.index = index
        self._token_texts = token_texts
        self._prompt_ids = prompt_ids
        self.num_generated_tokens = 0
        """Tokens of the completion so far; 0 where only the prompt is echoed."""
        self.completion: Completion | None = None
        self._request = request
        self._tokenizer = tokenizer
        tokens = ChannelTokens.read(tokenizer) if request.is_chat else None
        has_tools, params = request.tools is not None, request.params
        self._channels = (
            None
            if tokens is None
            else Channels(tokens, tokenizer, params.stop_texts, params.min_tokens, has_tools=has_tools)
        )
        self._hermes = HermesParser() if has_tools and tokens is None else None
        self._num_calls = 0
        self._step_texts = StepTexts(tokenizer) if request.body.return_steps else None
        self._offset = 0
        self._is_first = True

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning channel."""
        return self._channels.num_reasoning_tokens if self._channels else 0

    @property
    def _has_open_call(self) -> bool:
        parser = self._channels or self._hermes
        return parser is not None and parser.has_open_call

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of the prompt, counted for the first answer to it only."""
        if self.completion is None or self.index % self._request.body.n:
            return 0
        return self.completion.num_cached_tokens or 0

    def add(self, chunk: Chunk, *, is_delta: bool) -> Json:
        """The choice of a whole response, or of an event with what the chunk adds."""
        self.completion = chunk.completion
        if self._request.max_tokens == 0:
            chunk = msgspec.structs.replace(
                chunk, text="", token_ids=[], logprobs=chunk.logprobs and [], top_logprobs=None
            )
        self.num_generated_tokens += len(chunk.token_ids)
        choice: Json = {"index": self.index}
        if self._request.is_chat:
            choice["delta" if is_delta else "message"] = self._message(chunk, is_delta)
        else:
            choice["text"] = self._prompt_text() + chunk.text if self._request.echo and self._is_first else chunk.text
        choice["logprobs"] = None if chunk.logprobs is None else self._logprobs(chunk)
        self._is_first = False
        choice["finish_reason"] = chunk.completion and chunk.completion.finish_reason
        if self._num_calls and choice["finish_reason"] == "stop" and not self._has_open_call:
            choice["finish_reason"] = "tool_calls"
        choice["stop_reason"] = chunk.completion and chunk.completion.stop_reason
        if self._step_texts is not None:
            choice["steps"] = self._step_texts.read(chunk)
        return choice

    def _message(self, chunk: Chunk, is_delta: bool) -> Json:
        """A message or its delta; only the first delta has the role."""
        message: Json = {"role": "assistant"} if self._is_first else {}
        is_last = chunk.completion is not None
        reasoning, content = "", chunk.text
        calls: list[CallDelta] = []
        if self._channels is not None:
            reasoning, content, calls = self._channels.push(chunk.token_ids, is_last=is_last)
        elif self._hermes is not None:
            content, calls = self._hermes.push(chunk.text, is_last=is_last)
        if tool_calls := self._tool_calls(calls):
            message["tool_calls"] = tool_calls if is_delta else [_without_index(call) for call in tool_calls]
        if content or not is_delta:
            message["content"] = content or (None if tool_calls else "")
        if self._channels is not None and (reasoning or not is_delta):  # vLLM's name since 0.11, and the older one
            message |= {"reasoning": reasoning or None, "reasoning_content": reasoning or None}
        return message

    def _tool_calls(self, deltas: list[CallDelta]) -> list[Json]:
        """Deltas of each call; of the first one alone where calls may not be parallel."""
        calls: dict[int, Json] = {}
        for delta in deltas:
            self._num_calls += delta.name is not None
            if self._num_calls > 1 and self._request.tools is not None and not self._request.tools.parallel:
                break
            begin: Json = {"id": f"call_{uuid.uuid4().hex}", "type": "function"} if delta.name is not None else {}
            name = {"name": delta.name} if delta.name is not None else {}
            index = self._num_calls - 1
            call = calls.setdefault(index, {"index": index, **begin, "function": {**name, "arguments": ""}})
            call["function"]["arguments"] += delta.arguments
        return list(calls.values())

    def _prompt_text(self) -> str:
        prompt = self._request.prompts[self.index // self._request.body.n]
        return prompt if isinstance(prompt, str) else str(self._tokenizer.decode(list(prompt)))

    def _logprobs(self, chunk: Chunk) -> Json:
        assert chunk.logprobs is not None
        if self._request.is_chat:
            return chat_logprobs(self._token_name, chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
        token_ids = chunk.token_ids
        logprobs: Sequence[float | None] = chunk.logprobs
        top: Sequence[dict[int, float] | None] | None = chunk.top_logprobs
        if (prompt := chunk.prompt_logprobs) is not None:
            token_ids = [*self._prompt_ids, *token_ids]
            logprobs = [None, *prompt.logprobs, *logprobs]
            top = None if prompt.top_logprobs is None else [None, *prompt.top_logprobs, *(top or [])]
        shaped = completion_logprobs(self._token_name, token_ids, logprobs, top, self._offset)
        self._offset += sum(map(len, shaped["tokens"]))
        return shaped

    def _token_name(self, token: int) -> str:
        by_id = self._request.body.return_tokens_as_token_ids
        return f"token_id:{token}" if by_id else self._token_texts[token]


def _without_index(call: Json) -> Json:
    return {name: value for name, value in call.items() if name != "index"}


def has_content(delta: Json) -> bool:
    """Whether a streamed choice needs an event."""
    content = delta.get("text") or delta.get("delta") or delta["finish_reason"] or delta.get("steps")
    return bool(content) or delta["logprobs"] is not None


class Envelope:
    """Fields that all documents of one response share."""

    def __init__(self, request: GenerationRequest, model: str, num_draft_tokens: int) -> None:
        kind = "chat.completion" if request.is_chat else "text_completion"
        self._is_single = request.body.n == 1 and len(request.prompts) <= 1
        self._num_draft_tokens = num_draft_tokens
        self._common = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if request.is_chat and request.body.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def wrap(self, choices: Sequence[Json], **extra: object) -> Json:
        """A document with these choices."""
        return {**self._common, "choices": choices, **extra}

    def metrics(self, choices: Sequence[Choice]) -> Json | None:
        """vLLM's `metrics`; None for requests with several sequences."""
        completion = choices[0].completion
        return (
            completion_metrics(completion, self._num_draft_tokens)
            if self._is_single and completion is not None
            else None
        )


def usage(num_prompt_tokens: int, choices: Sequence[Choice]) -> Json:
    """Token counts of all prompts, each counted once, and of all sequences so far."""
    num_generated = sum(choice.num_generated_tokens for choice in choices)
    counts: Json = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt_tokens + num_generated,
    }
    if all(choice.completion is not None for choice in choices):
        counts["prompt_tokens_details"] = {"cached_tokens": sum(choice.num_cached_tokens for choice in choices)}
    if num_reasoning := sum(choice.num_reasoning_tokens for choice in choices):
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return counts


def completion_metrics(completion: Completion, num_draft_tokens: int) -> Json:
    """Metrics of one sequence, under vLLM's names."""
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
    """Counts of drafting passes, as in vLLM; index j of the histogram counts those that accepted exactly j."""
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


NUM_CONTEXT_TOKENS = 8
"""Emitted tokens that are decoded before rejected proposals, whose text may depend on them."""
Tokens = list[dict[str, Any]]


class StepTexts:
    """Decodes tokens one by one; their joined texts are the completion before it is cut at a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer)
        self._token_ids: list[int] = []

    def read(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Steps of a chunk: the prefill's token, then the verify passes."""
        num_verified = sum(len(step.token_ids) for step in chunk.steps)
        prefill = chunk.token_ids[: len(chunk.token_ids) - num_verified]
        steps: list[dict[str, Any]] = []
        if prefill:
            steps.append({"is_prefill": True, "proposals": [], "num_accepted": 0, "tokens": self._emit(prefill)})
        steps += [self._step(step) for step in chunk.steps]
        if chunk.completion is not None and steps:
            self._text.close()
            steps[-1]["tokens"][-1]["text"] += self._text.next_text()
        return steps

    def _step(self, step: Step) -> dict[str, Any]:
        accepted = step.token_ids[: step.accepted]
        prefix = [*self._token_ids[-NUM_CONTEXT_TOKENS:], *accepted]
        tokens = self._emit(step.token_ids)
        rejected = self._decode_rejected(prefix, step.proposals[step.accepted :])
        proposals = [*(dict(token) for token in tokens[: step.accepted]), *rejected]
        return {"is_prefill": False, "proposals": proposals, "num_accepted": step.accepted, "tokens": tokens}

    def _emit(self, token_ids: Sequence[int]) -> Tokens:
        self._token_ids += token_ids
        return [_token(self._text, token) for token in token_ids]

    def _decode_rejected(self, prefix: Sequence[int], token_ids: Sequence[int]) -> Tokens:
        """Tokens that were not emitted, decoded after `prefix`."""
        if not token_ids:
            return []
        text = TextStream(self._tokenizer)
        for token in prefix:
            text.push(token)
        text.next_text()
        return [_token(text, token) for token in token_ids]


def _token(text: TextStream, token: int) -> dict[str, Any]:
    text.push(token)
    return {"id": token, "text": text.next_text()}
