# SPDX-License-Identifier: Apache-2.0
"""Penalises tokens where the logits lie: cpp/sampling/penalties.cpp in torch's operators, for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_trt import _C
from dflash_trt.engine.plans.launcher import uploaded


class Penalised(NamedTuple):
    """Rows of logits that follow a history, the first one, and a proposal more, each later one."""

    rows: range
    params: _C.SamplerParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    proposals: Sequence[int]

    def counts(self) -> NDArray[np.int64]:
        """[n, 3]: each row with each token before it, and how often that stands in the output, 0 if in the prompt only.

        Prompts may hold ids beyond the logits (images).
        """
        num_prompt, num_known = len(self.prompt_ids), len(self.prompt_ids) + len(self.output_ids)
        ids = np.array([*self.prompt_ids, *self.output_ids, *self.proposals], dtype=np.int64)
        tokens, place = np.unique(ids, return_inverse=True)
        counts = np.full((len(self.rows), len(tokens)), -1)
        counts[:, place[:num_known]] = 0
        counts += np.bincount(place[num_prompt:num_known], minlength=len(tokens))
        for row, at in enumerate(place[num_known:], 1):
            counts[row:, at] = counts[row:, at].clip(0) + 1
        rows, found = np.nonzero(counts >= 0)
        return np.stack([self.rows.start + rows, tokens[found], counts[rows, found]], axis=1)


@torch.inference_mode()
def penalise(logits: Tensor, penalised: Sequence[Penalised]) -> None:
    """Applies penalties to logits [R, V] FLOAT in place, in FLOAT64, rounded once. The host waits for nothing."""
    if not penalised:
        return
    counts = np.concatenate([block.counts() for block in penalised])
    counts = counts[counts[:, 1] < logits.shape[1]]
    settings = np.zeros((len(logits), 3))
    for block in penalised:
        params = block.params
        settings[block.rows] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    rows, tokens, count = uploaded(torch.from_numpy(counts), logits.device).unbind(1)
    of_row = uploaded(torch.from_numpy(settings), logits.device)
    repetition, frequency, presence = of_row[rows].unbind(1)
    logit = logits[rows, tokens].double()
    logit = torch.where(logit < 0, logit * repetition, logit / repetition)
    logits[rows, tokens] = (logit - frequency * count - presence * (count > 0)).float()
