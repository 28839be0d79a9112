# SPDX-License-Identifier: Apache-2.0
"""Bytes that a target caches for each request: rows of K and V, of all tokens or of a window, or a recurrent state."""

from __future__ import annotations

import msgspec

STATE_BYTES = 4
"""Bytes of a number of recurrent state: FLOAT, as transformers keeps it whatever the weights are."""
CONVOLUTION_BYTES = 2


class RecurrentState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recurrent state of a target's gated delta nets, whose size does not depend on the sequence."""

    num_layers: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel: int
    """Width of the convolution, which caches kernel - 1 inputs."""

    def bytes(self, num_ranks: int = 1) -> int:
        """Bytes of a request's state on one of `num_ranks` ranks; some runtimes keep a copy for each draft token."""
        keys, values = -(-self.num_key_heads // num_ranks), -(-self.num_value_heads // num_ranks)
        channels = 2 * keys * self.key_head_dim + values * self.value_head_dim
        state = values * self.key_head_dim * self.value_head_dim
        return self.num_layers * (state * STATE_BYTES + channels * (self.kernel - 1) * CONVOLUTION_BYTES)


class TokenIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Index keys of full layers, from which a token selects the rows that it reads (DeepSeek sparse attention)."""

    top_k: int
    """Tokens that are selected; all of a shorter context."""
    head_dim: int
    pool: int
    """Tokens that share a key."""


class TargetCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cached rows and states of all layers of a target."""

    num_full_layers: int
    """Layers whose cache grows with the sequence."""
    num_sliding_layers: int
    sliding_window: int
    """Tokens that the sliding layers keep; 0 where there are none."""
    num_key_value_heads: int
    head_dim: int
    full_key_value_heads: int | None = None
    """KV heads of the full layers where the sliding ones have another number (Gemma 4)."""
    full_head_dim: int | None = None
    is_latent: bool = False
    """Whether a token is one row of `head_dim` numbers for K and V of all heads (MLA), on every rank whole."""
    index: TokenIndex | None = None
    """Index of every full layer, whole on every rank."""
    recurrent: RecurrentState | None = None
    """State of the layers that keep no rows."""

    def bytes(self, tokens: int, *, fp8: bool, num_ranks: int = 1) -> int:
        """Bytes of one request of `tokens` tokens on one of `num_ranks` tensor-parallel ranks, in FP8 or BF16."""
        rows = round(self.row_numbers(tokens, num_ranks)) * (1 if fp8 else 2)
        return rows + (self.recurrent.bytes(num_ranks) if self.recurrent else 0)

    def row_numbers(self, tokens: float, num_ranks: int = 1, *, is_read: bool = False) -> float:
        """Numbers in the rows of one request of `tokens` tokens, or of the mean request, on one of `num_ranks` ranks.

        With `is_read`, only the numbers that its next token reads.
        """
        full = self._row(
            self.full_key_value_heads or self.num_key_value_heads, self.full_head_dim or self.head_dim, num_ranks
        )
        sliding = self._row(self.num_key_value_heads, self.head_dim, num_ranks)
        windowed = self.num_sliding_layers * sliding * min(tokens, self.sliding_window)
        indexed = self.index.head_dim / self.index.pool * tokens if self.index else 0
        rows = self.full_rows(tokens) if is_read else tokens
        return self.num_full_layers * (full * rows + indexed) + windowed

    def full_rows(self, tokens: float) -> float:
        """Rows that a token after `tokens` others reads in a full layer."""
        return min(tokens, self.index.top_k) if self.index else tokens

    def rows(self, tokens: float) -> float:
        """Rows that a token after `tokens` others reads, over all layers."""
        sliding = self.num_sliding_layers * min(tokens, self.sliding_window)
        return self.num_full_layers * self.full_rows(tokens) + sliding

    def _row(self, heads: int, head_dim: int, num_ranks: int) -> int:
        """Numbers of one token in one layer; a head is never split."""
        return head_dim if self.is_latent else 2 * -(-heads // num_ranks) * head_dim
