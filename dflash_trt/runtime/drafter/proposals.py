# SPDX-License-Identifier: Apache-2.0
"""What a drafter proposes behind an anchor, and with what it draws that."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dflash_trt import _C


class Draw(NamedTuple):
    """What the proposals of one block are drawn with."""

    params: _C.SamplerParams
    """Temperature and seed of it; filters and penalties are the target's alone, as in z-lab's dflash 0.1.0."""
    position: int
    """The output position of the first."""


class Proposals(NamedTuple):
    """What is proposed behind one anchor, K tokens."""

    token_ids: list[int]
    candidate_ids: NDArray[np.int64] | None = None
    """[K, k], of proposals that were drawn; None where each was certain."""
    probabilities: NDArray[np.float64] | None = None
    """[K, k]: with which each candidate was drawn, given those drawn before it."""
    survival: list[float] | None = None
    """[K], never rising: how likely, by the draft, each is accepted with all before it; None where it does not say."""

    def first(self, count: int) -> Proposals:
        """The first `count` of them."""
        ids, q, survival = self.candidate_ids, self.probabilities, self.survival
        return Proposals(
            self.token_ids[:count],
            None if ids is None else ids[:count],
            None if q is None else q[:count],
            None if survival is None else survival[:count],
        )
