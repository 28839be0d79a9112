# SPDX-License-Identifier: Apache-2.0
"""Policy of how many draft tokens a step verifies.

The drafter always fills its whole block; this decides how much of it the target verifies. Longer is not better: each
token costs, above all on mixture-of-experts targets at high batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.runtime.policy.step_record import Policy


class DraftLength(Policy):
    """Decides how many of the K drafted tokens of each request a step verifies."""

    _explanation: str

    def lengths(self, asked: Sequence[int | None]) -> list[int]:
        """Drafts to verify for each request of a step that begins, of which each may have `asked` for a length."""
        if not asked:
            return []
        chosen = self.choose(len(asked))
        return [self.of_request(length, chosen) for length in asked]

    def choose(self, batch_size: int) -> int:
        """Draft length of the step, 0 (plain decoding) to K."""
        raise NotImplementedError

    def of_request(self, asked: int | None, chosen: int) -> int:
        """Draft length for a request that sets its own: min(asked, chosen), and `asked` itself under auto."""
        return chosen if asked is None else min(asked, chosen)

    def cut_length(self, survival: Sequence[float]) -> int:
        """Number of leading drafts to verify, of drafts that survive with these probabilities.

        Each probability depends only on the tokens before its draft, so cutting leaves samples exact.
        """
        return len(survival)

    def explain(self) -> str:
        """Current choice, and the reason for it."""
        return self._explanation
