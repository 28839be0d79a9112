# SPDX-License-Identifier: Apache-2.0
"""Passes in BF16 whose numbers for a token do not depend on what else is in the pass.

A block and its tokens one by one are the same sums in another order. In BF16 what that rounds can flip a greedy choice,
so here the order is made the same, to the last bit, on CPUs (oneDNN 3.12, torch 2.13; `agrees` asks this machine):

* Experts, and linear layers with long rows, have one kernel for any number of rows (the room `cpu/`). oneDNN and MKL
  compute one row on another kernel than two or more, and those all sum a row alike (`MIN_ROWS`: at 4, also MKL's in
  FP32, in which routers compute). So where a model has such products, a pass is padded with copies of its last row.
* Attention sums in the order of absolute positions (`cpu/paged_attention`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_trt.runtime.targets.target import Segment, Target

MIN_ROWS = 4
PROBE_TOKENS = 8


def agrees(target: Target) -> bool:
    """Whether logits of some tokens in one block equal those of one token a pass, to the last bit; on an empty target.

    Not on kernels that sum otherwise, nor in gated delta nets, which compute a block by another formula than a token.
    """

    def logits_of(begin: int, end: int) -> Tensor:
        segment = Segment(slot=0, token_ids=range(begin, end), num_logits=end - begin)
        logits = target.verify([segment], with_taps=False).logits
        target.rollback(0, 0)
        return logits

    one_by_one = torch.cat([logits_of(i, i + 1) for i in range(PROBE_TOKENS)])
    target.release(0)
    together = logits_of(0, PROBE_TOKENS)
    target.release(0)
    return torch.equal(one_by_one, together)
