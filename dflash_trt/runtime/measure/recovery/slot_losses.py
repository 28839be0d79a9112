# SPDX-License-Identifier: Apache-2.0
"""Cross entropy and divergence of rows of logits."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def slot_losses(
    logits: torch.Tensor, labels: torch.Tensor, expected: torch.Tensor | None, share: float
) -> torch.Tensor:
    """share * KL(expected || logits) + (1 - share) * cross entropy, [N], of logits [N, C] and labels [N].

    `expected` [N, C] are the teacher's logits; without them it is the cross entropy alone.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    if expected is None:
        return losses
    divergences = F.kl_div(
        F.log_softmax(logits, dim=-1), F.log_softmax(expected, dim=-1), reduction="none", log_target=True
    )
    return (1 - share) * losses + share * divergences.sum(-1)
