# SPDX-License-Identifier: Apache-2.0
"""A prompt: the turns that are sent, between which the model answers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class PromptTurn(msgspec.Struct, frozen=True):
    """A message before the model answers; a system prompt is sent with the next turn."""

    role: str
    text: str


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


def prompt_turns(texts: Iterable[str], messages: Iterable[Message] = ()) -> tuple[PromptTurn, ...]:
    return (*(PromptTurn("user", text) for text in texts), *(PromptTurn(m.role, m.content) for m in messages))


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The model's answers stand between its turns, as it gives them."""

    id: str
    turns: tuple[PromptTurn, ...]
    category: str | None = None
    timestamp: float | msgspec.UnsetType = msgspec.UNSET
    """Milliseconds at which a trace has it begin."""

    @property
    def num_requests(self) -> int:
        """One for each turn of the user."""
        return sum(turn.role == "user" for turn in self.turns)
