# SPDX-License-Identifier: Apache-2.0
"""Walks of a drafter through the lattice of one block, in a batch of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from dflash_trt.engine.candidate_lattice import CandidateLattice
from dflash_trt.engine.proposals import Draw, Proposals
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.open import open_drafter
from tests.decoding import Tables, hidden_of
from tests.engines import build


def opened(draft: Path, work: Path, taps: torch.Tensor, num_context: int, rows: int) -> tuple[Drafter, list[int]]:
    """Our drafter with the context injected, with more `rows` next to other contexts, and the slots of all."""
    drafter = open_drafter(work, build(draft, work), num_slots=rows)
    slots, lengths = list(range(rows)), [num_context, *(3 * row for row in range(1, rows))]
    for slot in slots:
        drafter.reserve(slot, [2 * slot, 2 * slot + 1], 0)
    drafter.inject(slots, lengths, torch.cat([taps, *(torch.randn(n, taps.shape[1]) for n in lengths[1:])]))
    return drafter, slots


def walked(
    drafter: Drafter, slots: Sequence[int], anchors: list[int], num_tokens: int, target: Tables,
    draws: Sequence[Draw | None] = (),
) -> tuple[torch.Tensor, Proposals, CandidateLattice | None]:  # fmt: skip
    """Hidden states of all blocks, proposals of the first, and the lattice that they are a path through."""
    hidden = hidden_of(drafter, slots, drafter.embedding.blocks(torch.tensor(anchors), target.embed).clone())
    drafter.borrow(target)
    with patch.object(CandidateLattice, "walk", autospec=True, side_effect=CandidateLattice.walk) as walk:
        proposed = drafter.propose(slots, anchors, num_tokens, draws or [None] * len(anchors))[0]
    return hidden, proposed, walk.call_args.args[0] if walk.called else None
