# SPDX-License-Identifier: Apache-2.0
"""Attention over the pages of each request's slot, as an attention implementation of transformers.

Linear layers and experts see the new tokens of all requests as one matrix; attention asks the pass whose a row is.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from dflash_trt.runtime.targets.packed_pass import AttentionRule, Pass

IMPLEMENTATION = "slot_attention"  # transformers takes any name with "flash" in it for FlashAttention


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    slot_pass: Pass,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, N, R, D], key and value [1, G, R, D] of the pass -> [1, R, N, D].

    transformers' own signature (5.23, AttentionInterface); `s_aux` [N] are gpt-oss's sinks, `softcap` is Gemma 2's.
    Rows behind those of the pass are padding, in and out.
    """
    num_rows, num_padded = len(slot_pass.positions), query.shape[2]
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0, :, :num_rows] for x in (query, key, value))
    rows = slot_pass.attend(layer, query, key, value, AttentionRule(scale, sliding_window, softcap, s_aux))
    return F.pad(rows, (0, 0, 0, 0, 0, num_padded - num_rows))[None] if num_padded > num_rows else rows[None], None


AttentionInterface.register(IMPLEMENTATION, slot_attention)
