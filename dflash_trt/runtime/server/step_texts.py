# SPDX-License-Identifier: Apache-2.0
"""The `steps` field: what each verify pass proposed, accepted and emitted, with texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_trt.api.acceptance import Step
from dflash_trt.api.backend import Chunk
from dflash_trt.runtime.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
