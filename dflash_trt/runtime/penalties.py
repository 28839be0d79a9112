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
from dflash_trt.device.upload import uploaded


class Penalised(NamedTuple):
    """Rows of logits that follow a history, the first one, and a proposal more, each later one."""

    rows: range
    params: _C.SamplerParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    proposals: Sequence[int]

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Tokens [T] of history and proposals, and below how often each, before each row [n], stands in the output.

        0: in the prompt only; -1: not there. Prompts may hold ids beyond the logits (images).
        """
        num_prompt, num_known = len(self.prompt_ids), len(self.prompt_ids) + len(self.output_ids)
        ids = np.array([*self.prompt_ids, *self.output_ids, *self.proposals], dtype=np.int64)
        tokens, place = np.unique(ids, return_inverse=True)
        count = np.full(len(tokens), -1)
        count[place[:num_known]] = 0
        count += np.bincount(place[num_prompt:num_known], minlength=len(tokens))
        lines = [tokens, count]
        for at in place[num_known:]:
            lines.append(lines[-1].copy())
            lines[-1][at] = max(0, lines[-1][at]) + 1
        return np.stack(lines)[:, tokens < vocab_size]


@torch.inference_mode()
def penalise(logits: Tensor, penalised: Sequence[Penalised]) -> None:
    """Applies penalties to logits [R, V] FLOAT in place, in FLOAT64, rounded once. The host waits for nothing."""
    for block in penalised:
        params, rows = block.params, logits[block.rows.start : block.rows.stop]
        settings = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        table = uploaded(torch.from_numpy(block.counts(logits.shape[1])), logits.device)
        repetition, frequency, presence = uploaded(torch.tensor(settings, dtype=torch.float64), logits.device)
        tokens, counts = table[0], table[1:]
        before = rows[:, tokens].double()
        logit = torch.where(before < 0, before * repetition, before / repetition)
        logit = logit - frequency * counts - presence * (counts > 0)
        rows[:, tokens] = torch.where(counts < 0, before, logit).float()
