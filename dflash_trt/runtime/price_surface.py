# SPDX-License-Identifier: Apache-2.0
"""Prices of steps as a surface over running requests and drafts: what some steps took says what others will.

A Gaussian process (Rasmussen and Williams 2006, chapter 2): a step costs something by itself, for each request, for
each token, and for drafting, by itself and for each request; beyond that it bends smoothly, and each place a little by
itself. What is not known of a price is known, too: its covariance.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

FIXED, BY_REQUEST, BY_TOKEN, DRAFTING, DRAFTING_BY_REQUEST = 1.0, 1.0, 1.5, 0.7, 0.7
"""Standard deviations, as shares of the typical price, at the number of requests that is asked for."""
BEND, BEND_LENGTHS, BEND_DOUBLINGS = 0.2, 0.25, 1.5
"""Of the smooth rest, and over which share of all lengths, and how many doublings of the requests, it changes."""
OWN = 0.02
"""Of what each place has by itself."""


def estimate(places: Array, prices: Array, variances: Array, asked: Array) -> tuple[Array, Array]:
    """Prices [M] at the places `asked` [M, 3], and their covariance [M, M].

    A place is the number of requests as a multiple of that asked for, the share of the block that is verified, and
    whether there is drafting (1 or 0). `prices` [N] were found at `places` [N, 3], with these `variances`.
    """
    scale = np.median(prices)
    known = _covariance(places, places) + np.diag(variances / scale**2 + OWN**2)
    across = _covariance(asked, places)
    weights = np.linalg.solve(known, across.T).T  # [M, N]
    mean = scale + weights @ (prices - scale)
    covariance = (_covariance(asked, asked) + OWN**2 * np.eye(len(asked)) - weights @ across.T) * scale**2
    return np.maximum(mean, prices.min() / 4), covariance


def _covariance(a: Array, b: Array) -> Array:
    """[N, M], as shares of the typical price."""
    (requests, share, drafting), (requests_, share_, drafting_) = a.T[:, :, None], b.T[:, None, :]
    doublings, lengths = np.log2(requests / requests_), share - share_
    by_request = requests * requests_
    bend = np.exp(-((doublings / BEND_DOUBLINGS) ** 2 + (lengths / BEND_LENGTHS) ** 2) / 2)
    covariance: Array = (
        FIXED**2
        + by_request * (BY_REQUEST**2 + BY_TOKEN**2 * share * share_)
        + drafting * drafting_ * (DRAFTING**2 + DRAFTING_BY_REQUEST**2 * by_request)
        + BEND**2 * bend * (drafting == drafting_)
    )
    return covariance
