# SPDX-License-Identifier: Apache-2.0
"""The tokens of each decoding step as text, for `return_steps`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_trt.api.acceptance import Step
from dflash_trt.api.backend import Chunk
from dflash_trt.runtime.server.answer.bodies import DecodingStep, StepToken
from dflash_trt.runtime.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_CONTEXT_TOKENS = 8
"""Emitted tokens that are decoded before rejected proposals, whose text may depend on them."""


class StepTexts:
    """Decodes tokens one by one; their joined texts are the completion before it is cut at a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer)
        self._token_ids: list[int] = []

    def read(self, chunk: Chunk) -> list[DecodingStep]:
        """Steps of a chunk: the prefill's token, then the verify passes."""
        num_verified = sum(len(step.token_ids) for step in chunk.steps)
        prefill = chunk.token_ids[: len(chunk.token_ids) - num_verified]
        steps = []
        if prefill:
            steps.append(DecodingStep(is_prefill=True, proposals=[], num_accepted=0, tokens=self._emit(prefill)))
        steps += [self._step(step) for step in chunk.steps]
        if chunk.completion is not None and steps:
            self._text.close()
            steps[-1].tokens[-1].text += self._text.next_text()
        return steps

    def _step(self, step: Step) -> DecodingStep:
        accepted = step.token_ids[: step.accepted]
        prefix = [*self._token_ids[-NUM_CONTEXT_TOKENS:], *accepted]
        tokens = self._emit(step.token_ids)
        proposals = [StepToken(token.id, token.text) for token in tokens[: step.accepted]]
        proposals += self._decode_rejected(prefix, step.proposals[step.accepted :])
        return DecodingStep(is_forced=step.is_forced, proposals=proposals, num_accepted=step.accepted, tokens=tokens)

    def _emit(self, token_ids: Sequence[int]) -> list[StepToken]:
        self._token_ids += token_ids
        return [_token(self._text, token) for token in token_ids]

    def _decode_rejected(self, prefix: Sequence[int], token_ids: Sequence[int]) -> list[StepToken]:
        """Tokens that were not emitted, decoded after `prefix`."""
        if not token_ids:
            return []
        text = TextStream(self._tokenizer)
        for token in prefix:
            text.push(token)
        text.next_text()
        return [_token(text, token) for token in token_ids]


def _token(text: TextStream, token: int) -> StepToken:
    text.push(token)
    return StepToken(token, text.next_text())
