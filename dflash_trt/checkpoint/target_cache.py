# SPDX-License-Identifier: Apache-2.0
"""What a target keeps of each token: rows of K and V, of all tokens or of a window, by layer."""

from __future__ import annotations

import msgspec

from dflash_trt.checkpoint.facts import Facts

FULL, SLIDING = "full_attention", "sliding_attention"


class TargetCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows that every layer of a target keeps."""

    num_full_layers: int
    """Layers whose cache grows with the sequence."""
    num_sliding_layers: int
    sliding_window: int
    """Tokens that the sliding layers keep; 0 where there are none."""
    num_key_value_heads: int
    head_dim: int

    def bytes(self, tokens: int, *, fp8: bool, ranks: int = 1) -> int:
        """Of one request of `tokens` tokens on one of `ranks` tensor-parallel ranks, in FP8 or BF16."""
        heads = -(-self.num_key_value_heads // ranks)  # a head is never split
        row = 2 * heads * self.head_dim * (1 if fp8 else 2)
        return row * (self.num_full_layers * tokens + self.num_sliding_layers * min(tokens, self.sliding_window))


def read_target_cache(config: Facts, num_layers: int) -> TargetCache | None:
    """From the language model's section of config.json; None where layers keep another state than K and V.

    Latent and linear attention do: the size of theirs is not known here. Raises CheckpointError for a missing fact.
    """
    types = config.texts("layer_types") if "layer_types" in config else (FULL,) * num_layers
    if not set(types) <= {FULL, SLIDING} or "kv_lora_rank" in config:
        return None
    head_dim = config.optional("head_dim", config.integer)
    return TargetCache(
        num_full_layers=types.count(FULL),
        num_sliding_layers=num_layers - types.count(FULL),
        sliding_window=config.integer("sliding_window") if SLIDING in types else 0,
        num_key_value_heads=config.integer("num_key_value_heads"),
        head_dim=head_dim or config.integer("hidden_size") // config.integer("num_attention_heads"),
    )
