# SPDX-License-Identifier: Apache-2.0
"""A prompt: the turns that are sent; the model answers after each of the user's."""

from __future__ import annotations

import msgspec


class Turn(msgspec.Struct, frozen=True):
    """A message before the model answers; a system prompt is sent with the next turn."""

    role: str
    content: str


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of a prompt, without the model's answers."""

    id: str
    turns: tuple[Turn, ...]
    category: str | None = None
    timestamp: float | msgspec.UnsetType = msgspec.UNSET
    """Start of the prompt in a trace, in milliseconds."""

    @property
    def num_requests(self) -> int:
        """One for each turn of the user."""
        return sum(turn.role == "user" for turn in self.turns)


def user_turns(*texts: str) -> tuple[Turn, ...]:
    return tuple(Turn("user", text) for text in texts)
