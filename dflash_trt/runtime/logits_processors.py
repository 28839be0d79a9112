# SPDX-License-Identifier: Apache-2.0
"""Logits processors: they change the target's logits before tokens are drawn, or drafts compared with them.

Each row of a verify pass is changed as plain decoding would change it there, so drafts stay lossless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class LogitsProcessor(Protocol):
    """Processor of one request's logits."""

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        """Changes rows [K + 1, V] in place; row r follows the answer so far and `proposals` [:r].

        Rows after a proposal that its row has ruled out (-infinity) may be left unchanged. A RequestError ends the
        request.
        """

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that were appended to the answer."""

    def forced(self) -> list[int]:
        """Tokens that must come next, each the only one that its row leaves; [] where there is a choice."""


class LogitBias:
    """Adds to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._token_ids = list(bias)
        self._bias = list(bias.values())

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        """Adds the bias to each row."""
        logits[:, self._token_ids] += self._bias

    def advance(self, token_ids: Sequence[int]) -> None:
        """Does nothing: the bias is the same everywhere."""

    def forced(self) -> list[int]:
        """Forces none."""
        return []


class MinTokens:
    """Rules out the tokens that would end an answer before it has `num_tokens` tokens."""

    def __init__(self, num_tokens: int, stop_ids: Iterable[int]) -> None:
        self._num_left = num_tokens
        self._stop_ids = list(stop_ids)

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        """Masks the rows of tokens that come too early."""
        logits[: self._num_left, self._stop_ids] = -np.inf

    def advance(self, token_ids: Sequence[int]) -> None:
        """Counts the tokens."""
        self._num_left = max(0, self._num_left - len(token_ids))

    def forced(self) -> list[int]:
        """Forces none."""
        return []
