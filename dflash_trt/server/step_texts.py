# SPDX-License-Identifier: Apache-2.0
"""What each step proposed and emitted, as the page shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_trt.runtime.backend import Chunk
from dflash_trt.runtime.request import Step
from dflash_trt.runtime.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 8
"""Tokens before a proposal that its text may depend on."""
Tokens = list[dict[str, Any]]


class StepTexts:
    """Decodes one answer's tokens one by one: their texts, joined, are the answer's before a stop text cuts it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer)
        self._token_ids: list[int] = []

    def read(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The steps of a chunk: the prefill's one token, and what verify passes proposed and emitted."""
        verified = sum(len(step.token_ids) for step in chunk.steps)
        prefill = chunk.token_ids[: len(chunk.token_ids) - verified]
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
        window = [*self._token_ids[-WINDOW:], *accepted]
        tokens = self._emit(step.token_ids)
        rejected = self._branch(window, step.proposals[step.accepted :])
        proposals = [*(dict(token) for token in tokens[: step.accepted]), *rejected]
        return {"is_prefill": False, "proposals": proposals, "num_accepted": step.accepted, "tokens": tokens}

    def _emit(self, token_ids: Sequence[int]) -> Tokens:
        self._token_ids += token_ids
        return [_token(self._text, token) for token in token_ids]

    def _branch(self, before: Sequence[int], token_ids: Sequence[int]) -> Tokens:
        """Tokens that were not emitted, behind those `before` them."""
        if not token_ids:
            return []
        text = TextStream(self._tokenizer)
        for token in before:
            text.push(token)
        text.next_text()
        return [_token(text, token) for token in token_ids]


def _token(text: TextStream, token: int) -> dict[str, Any]:
    text.push(token)
    return {"id": token, "text": text.next_text()}
