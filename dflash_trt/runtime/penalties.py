# SPDX-License-Identifier: Apache-2.0
"""Penalises tokens where the logits lie: cpp/sampling/penalties.cpp in torch's operators, for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_trt import _C
from dflash_trt.device.upload import uploaded


class Penalised(NamedTuple):
    """Rows of logits that follow prompt and answer, the first one, and a proposal more, each later one."""

    rows: range
    params: _C.SamplerParams
    answer: _C.Answer
    proposals: Sequence[int]


@torch.inference_mode()
def penalise(logits: Tensor, penalised: Sequence[Penalised]) -> None:
    """Applies penalties to logits [R, V] FLOAT in place, in FLOAT64, rounded once. The host waits for nothing."""
    for block in penalised:
        params, rows = block.params, logits[block.rows.start : block.rows.stop]
        settings = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        repetition, frequency, presence = uploaded(torch.tensor(settings, dtype=torch.float64), logits.device)
        table = torch.from_numpy(block.answer.table_of_counts(logits.shape[1], list(block.proposals)))
        tokens, known = uploaded(table, logits.device).view(2, -1)
        proposed = uploaded(torch.tensor([block.proposals], dtype=torch.int64), logits.device).T
        added = torch.cat([torch.zeros_like(tokens)[None], (tokens == proposed).cumsum(0)])
        counts = torch.where(added > 0, known.clamp(min=0) + added, known)
        before = rows[:, tokens].double()
        logit = torch.where(before < 0, before * repetition, before / repetition)
        logit = logit - frequency * counts - presence * (counts > 0)
        rows[:, tokens] = torch.where(counts < 0, before, logit).float()
