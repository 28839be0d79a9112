# SPDX-License-Identifier: Apache-2.0
"""What changes the target's logits before tokens are drawn from them, and drafts compared with them.

Each row of a verify pass is changed as plain decoding would change it there, so drafts stay lossless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class LogitsProcessor(Protocol):
    """Of one request."""

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        """Changes rows [K + 1, V] in place; row r follows the answer so far and `proposals` [:r].

        A row behind a proposal that its own row has ruled out (-infinity) may stay as it is. A RequestError ends the
        request.
        """

    def advance(self, token_ids: Sequence[int]) -> None:
        """Tokens that the answer has grown by."""


class LogitBias:
    """Adds to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._token_ids = list(bias)
        self._bias = list(bias.values())

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        """The same in each row."""
        logits[:, self._token_ids] += self._bias

    def advance(self, token_ids: Sequence[int]) -> None:
        """Nothing: the bias is the same everywhere."""
