# SPDX-License-Identifier: Apache-2.0
"""Passes in BF16 whose numbers for a token do not depend on what else is in the pass.

Verifying a block and decoding token by token are the same sums in another order. In BF16 what that rounds is large
enough to flip a greedy choice, so here the order is made the same, to the last bit, on CPUs (oneDNN 3.12, torch 2.13;
`agrees` asks this machine):

* A product of one row runs on another kernel than one of two or more, and those all sum a row alike (`MIN_ROWS`: at 4,
  also MKL's in FP32, in which routers compute). So a pass is padded with copies of its last row, and so are the tokens
  of an expert that is asked by only one.
* `scaled_dot_product_attention` splits its work by the shape of the block. `attend` is products and a softmax, which
  sum over the context: its order is that of the absolute position. Zeros before or behind do not change a sum.

Legend: G kv-heads, B segments, M rows (tokens and query heads that share a kv-head), C cached rows, D head_dim.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from dflash_trt.targets.target import Segment, Target

MIN_ROWS = 4
LANES = 16
"""FP32 numbers of a register, into which a softmax sums: a context begins at a multiple, and is filled up to one."""
MIN_CONTEXT = 128
"""Products of fewer than 4097 multiplications run in torch itself, which sums otherwise."""
CHUNK = 512
"""Products over more than 1024 numbers are split up by oneDNN, so they are split here, at absolute positions."""
MAX_SCORES = 2**24
"""At once, 64 MiB; rows beyond take turns."""
PROBE_TOKENS = 8
EXPERTS = "row_independent"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    *,
    first: int = 0,
) -> Tensor:
    """q [G, B, M, D], k [G, B, C, D], v [G, B, C, D'] in BF16, mask [1, B, M, C] -> [G, B, M, D'] BF16.

    The mask is added: 0 or minus infinity. `sinks` [G, 1, M] carry no value. `first` is the position of k[:, :, 0], a
    multiple of LANES.
    """
    num_rows = q.shape[2]
    if num_rows < MIN_ROWS:
        q, mask = _repeated(q, 2), _repeated(mask, 2)
        sinks = None if sinks is None else _repeated(sinks, 2)
    k, v = _filled_up(k), _filled_up(v)
    mask = F.pad(mask, (0, k.shape[2] - mask.shape[3]), value=-torch.inf)
    row_scores = q.shape[0] * k.shape[1] * k.shape[2]
    turns = math.ceil(q.shape[2] / max(MIN_ROWS, MAX_SCORES // row_scores))  # of at least two rows
    rows = zip(
        q.tensor_split(turns, dim=2),
        mask.tensor_split(turns, dim=2),
        [None] * turns if sinks is None else sinks.tensor_split(turns, dim=2),
        strict=True,
    )
    mixed = []
    for q_rows, mask_rows, sink_rows in rows:
        scores = (q_rows @ k.transpose(-1, -2)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = _softmax(scores + mask_rows, sink_rows)
        mixed.append(_mix(weights.to(v.dtype), v, first))
    return torch.cat(mixed, dim=2)[:, :, :num_rows]


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [G, B, M, C] FLOAT, each in the lane of its position; a head's sink stands before them."""
    num_scores = scores.shape[-1]
    front = 0 if sinks is None else LANES
    scores = F.pad(scores, (front, -num_scores % LANES), value=-torch.inf)
    if sinks is not None:
        scores[..., 0] = sinks
    return scores.softmax(dim=-1)[..., front : front + num_scores]


def _mix(weights: Tensor, v: Tensor, first: int) -> Tensor:
    """weights [G, B, M, C] @ v [G, B, C, D'], chunk by chunk."""
    num_rows = v.shape[2]
    begins = [0, *range(CHUNK - first % CHUNK, num_rows, CHUNK)]
    mixed = []
    for begin, end in pairwise([*begins, num_rows]):
        chunk = _filled_up(v[:, :, begin:end])
        mixed.append(F.pad(weights[..., begin:end], (0, chunk.shape[2] - (end - begin))) @ chunk)
    if len(mixed) == 1:
        return mixed[0]
    return functools.reduce(torch.add, [chunk.float() for chunk in mixed]).to(v.dtype)


def _repeated(rows: Tensor, dim: int) -> Tensor:
    """`rows`, fewer than MIN_ROWS, several times."""
    return torch.cat([rows] * MIN_ROWS, dim=dim).narrow(dim, 0, MIN_ROWS)


def _filled_up(cached: Tensor) -> Tensor:
    """cached [G, B, C, D] with at least MIN_CONTEXT rows, zeros behind the others."""
    missing = MIN_CONTEXT - cached.shape[2]
    return F.pad(cached, (0, 0, 0, missing)) if missing > 0 else cached


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An experts implementation of transformers (5.23): no expert that is asked computes a single row.

    hidden_states [R, H], top_k_index and top_k_weights [R, K] -> [R, H].
    """
    asked = torch.bincount(top_k_index.flatten(), minlength=self.num_experts + 1)
    alone = (asked[top_k_index] == 1).any(dim=-1).nonzero().flatten()
    rows = torch.cat([torch.arange(len(hidden_states), device=alone.device), alone])
    mixed: Tensor = grouped_mm_experts_forward(self, hidden_states[rows], top_k_index[rows], top_k_weights[rows])
    return mixed[: len(hidden_states)]


def agrees(target: Target) -> bool:
    """Whether logits of some tokens in one block equal those of one token a pass, to the last bit; on an empty target.

    Where it says no, in BF16 a near-tie may fall another way than in plain decoding: on a CPU or GPU whose kernels sum
    otherwise, and in gated delta nets, which compute a block by another formula than a token.
    """

    def logits(begin: int, end: int) -> Tensor:
        segment = Segment(slot=0, token_ids=range(begin, end), num_logits=end - begin)
        found = target.verify([segment], with_taps=False).logits
        target.rollback(0, 0)
        return found

    one_by_one = torch.cat([logits(i, i + 1) for i in range(PROBE_TOKENS)])
    target.release(0)
    together = logits(0, PROBE_TOKENS)
    target.release(0)
    return torch.equal(one_by_one, together)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts)
