# SPDX-License-Identifier: Apache-2.0
"""Proposals of one block, greedy or drawn from the draft's distributions, and the parameters to draw them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dflash_trt import _C

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Draw(NamedTuple):
    """Sampling parameters of one block's proposals."""

    params: _C.SamplerParams
    """Only temperature and seed are used; filters and penalties are the target's, as in z-lab's dflash 0.1.0."""
    position: int
    """Output position of the first proposal."""


class Proposals(NamedTuple):
    """K tokens proposed after one anchor."""

    token_ids: list[int]
    candidate_ids: NDArray[np.int64] | None = None
    """[K, k]: the candidates that drawn proposals were chosen from; None for greedy ones."""
    probabilities: NDArray[np.float64] | None = None
    """[K, k]: probability of each candidate, given the tokens drawn before it."""
    survival: list[float] | None = None
    """[K], never rising: the draft's estimate that each token is accepted with all before it; None without one."""
    is_forced: bool = False
    """Whether a grammar leaves no other tokens; the drafter did not propose them."""

    def first(self, count: int) -> Proposals:
        """The first `count` proposals."""
        ids, q, survival = self.candidate_ids, self.probabilities, self.survival
        return Proposals(
            self.token_ids[:count],
            None if ids is None else ids[:count],
            None if q is None else q[:count],
            None if survival is None else survival[:count],
            self.is_forced,
        )
