# SPDX-License-Identifier: Apache-2.0
"""What the cost model must know of models and machine: sizes, bits and ranks. Values only."""

from __future__ import annotations

from typing import Literal

import msgspec

Method = Literal["none", "eagle3", "dflash"]
METHODS: tuple[Method, ...] = ("none", "eagle3", "dflash")


class TargetShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A target: dense MLPs (`intermediate_size`), experts (`num_experts`), or both."""

    target: str
    num_layers: int
    num_full_layers: int
    """Layers whose cache grows with the sequence; the others keep `sliding_window` tokens."""
    sliding_window: int = 0
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int
    num_experts: int = 0
    top_k: int = 0
    expert_intermediate_size: int = 0
    expert_bits: float = 16
    weight_bits: float = 16
    """Of attention and dense MLPs."""
    head_bits: float = 16
    """Of embedding and lm_head."""

    @property
    def attention_params(self) -> int:
        """Of one layer: q, k, v and o."""
        return 2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)

    @property
    def mlp_params(self) -> int:
        """Of one layer's dense MLP."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def expert_params(self) -> int:
        """Of one expert."""
        return 3 * self.hidden_size * self.expert_intermediate_size

    @property
    def head_params(self) -> int:
        """Of lm_head."""
        return self.vocab_size * self.hidden_size

    @property
    def active_params(self) -> int:
        """That one token is multiplied with, lm_head aside."""
        layer = self.attention_params + self.mlp_params + self.top_k * self.expert_params
        return self.num_layers * layer

    @property
    def weight_bytes(self) -> float:
        """All of the target, embedding included."""
        layer = (self.attention_params + self.mlp_params) * self.weight_bits / 8
        experts = self.num_experts * self.expert_params * self.expert_bits / 8
        return self.num_layers * (layer + experts) + 2 * self.head_params * self.head_bits / 8


class DraftShape(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter: DFlash's (one pass over a block), or EAGLE-3's (`is_chain`: one pass for each draft)."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_taps: int
    max_draft_tokens: int
    """K at most: block_size - 1, or the longest chain that is considered."""
    layer_bits: float = 16
    """Of the layers' projections, scales included."""
    fc_bits: float = 16
    head_rows: int = 0
    """Rows of a head of its own; 0: the target's lm_head."""
    is_chain: bool = False
    runs_whole_block: bool = False
    """Whether every pass computes the whole block, however few drafts are verified (engine mode)."""

    @property
    def layer_params(self) -> int:
        """Of one layer; an EAGLE-3 layer reads the embedding beside the hidden state."""
        inputs = 2 if self.is_chain else 1
        qkv = self.hidden_size * self.head_dim * (self.num_attention_heads + 2 * self.num_key_value_heads)
        out = self.hidden_size * self.head_dim * self.num_attention_heads
        return inputs * qkv + out + 3 * self.hidden_size * self.intermediate_size

    @property
    def fc_params(self) -> int:
        """Of the projection of the taps."""
        return self.num_taps * self.hidden_size * self.hidden_size

    @property
    def context_params(self) -> int:
        """Of K and V of all layers, which every verified token passes again as context."""
        return 2 * self.num_layers * self.hidden_size * self.head_dim * self.num_key_value_heads


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Models on GPUs under a runtime."""

    target: TargetShape
    draft: DraftShape | None
    eagle3: DraftShape | None
    gpu: str
    gpu_memory_bytes: int
    num_gpus: int
    tensor_parallel: int
    expert_parallel: int
    drafter_ranks: int
    """Ranks that share one drafter: all natively, one in engine mode (a drafter on every GPU)."""
    runtime: str
    kv_bytes: int = 2
    """Of a cached K or V element."""
    max_batch_size: int = 64
    max_seq_len: int = 32768
    max_num_tokens: int = 16384
    pool_fraction: float = 0.8
    is_arena_dense: bool = True
    """Whether the drafter's context is set aside for every request at full length."""

    def drafter(self, method: Method) -> DraftShape | None:
        """The drafter of a method; None for plain decoding, and where the system has none."""
        return {"none": None, "eagle3": self.eagle3, "dflash": self.draft}[method]
