# SPDX-License-Identifier: Apache-2.0
"""Log probabilities under the target's own logits: no bias, grammar, penalty, temperature or filter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflash_trt import _C


def token_logprobs(
    logits: npt.NDArray[np.float32], token_ids: Sequence[int], num_top: int
) -> tuple[list[float], list[dict[int, float]]]:
    """Of token r in row r of logits [R, V], R >= the number of tokens, and of the `num_top` most likely ones there.

    Those come most likely first, the lower id first among equals.
    """
    logprobs = _C.token_logprobs(logits, list(token_ids))
    if num_top == 0:
        return logprobs, []
    top = []
    for row, token, logprob in zip(logits, token_ids, logprobs, strict=False):
        candidates = np.flatnonzero(row >= np.partition(row, -num_top)[-num_top])
        best = candidates[np.argsort(-row[candidates], kind="stable")][:num_top]
        values = logprob + (row[best].astype(np.float64) - float(row[token]))
        top.append(dict(zip(best.tolist(), values.tolist(), strict=True)))
    return logprobs, top
