# SPDX-License-Identifier: Apache-2.0
"""Which drafts of a batch are verified, when there is room for some: those most likely to be accepted.

Each request that drafts has one verified at least: what its drafts are worth now is then always known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Reached = Sequence[Sequence[float]] | npt.NDArray[np.float64]
"""[B, K]: for each request P(1) .. P(K), the probability that its first i drafts are all accepted."""


def tokens_by_length(reached: Reached) -> list[float]:
    """Expected tokens of a step of all requests that verifies k = 0 .. K drafts of each on average."""
    matrix = np.asarray(reached)
    batch_size, K = matrix.shape
    likeliest = np.sort(matrix[:, 1:], axis=None)[::-1]
    sums = np.concatenate([[0.0], np.cumsum(likeliest)])
    first = matrix[:, 0].sum()
    return [float(batch_size), *(float(batch_size + first + sums[(k - 1) * batch_size]) for k in range(1, K + 1))]


def share_out(reached: Reached, length: int) -> list[int]:
    """How many drafts of each request are verified where it is `length` on average; their number is exact."""
    matrix = np.asarray(reached)
    batch_size = len(matrix)
    if length == 0:
        return [0] * batch_size
    # Position by position: of equals, the earlier one goes first, so that what is taken are beginnings of blocks.
    order = np.argsort(-matrix[:, 1:].T.ravel(), kind="stable")[: (length - 1) * batch_size]
    more: list[int] = np.bincount(order % batch_size, minlength=batch_size).tolist()
    return [1 + count for count in more]
