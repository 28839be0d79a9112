# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of tokens that a request asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflash_trt import _C
from dflash_trt.runtime.request import Request

Rows = npt.NDArray[np.float32]


def add_logprobs(request: Request, rows: Rows, token_ids: Sequence[int]) -> None:
    """Adds log probabilities of accepted tokens, by rows [n, V] of logits, n >= the number of tokens."""
    logprobs, top = token_logprobs(rows, token_ids, request.params.top_logprobs)
    request.logprobs += logprobs
    request.top_logprobs += top


def add_prompt_logprobs(request: Request, rows: Rows) -> None:
    """Adds log probabilities of the next n prompt tokens, by rows [n, V] of logits."""
    begin = len(request.prompt_logprobs) + 1
    token_ids = request.prompt_ids[begin : begin + len(rows)]
    logprobs, top = token_logprobs(rows, token_ids, request.params.top_logprobs)
    request.prompt_logprobs += logprobs
    request.prompt_top_logprobs += top


def token_logprobs(logits: Rows, token_ids: Sequence[int], num_top: int) -> tuple[list[float], list[dict[int, float]]]:
    """Log probabilities under the target's own logits: no bias, grammar, penalty, temperature or filter.

    Returns that of token r by row r of logits [R, V], R >= the number of tokens, and the `num_top` most likely tokens
    of each row, most likely first, the lower id first among equals.
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
