# SPDX-License-Identifier: Apache-2.0
"""One prompt: what its user says, one turn after another."""

from __future__ import annotations

import msgspec


class PromptTurn(msgspec.Struct, frozen=True):
    """What is said before the model answers; a system prompt is one that is sent with the next."""

    role: str
    text: str


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The model's answers stand between its turns, as it gives them."""

    id: str
    turns: tuple[PromptTurn, ...]
    category: str | None = None

    @property
    def num_requests(self) -> int:
        """One for each turn of the user."""
        return sum(turn.role == "user" for turn in self.turns)
