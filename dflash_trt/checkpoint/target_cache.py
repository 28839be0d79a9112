# SPDX-License-Identifier: Apache-2.0
"""Bytes that a target caches for each request: rows of K and V, of all tokens or of a window, or a recurrent state."""

from __future__ import annotations

import msgspec

from dflash_trt.checkpoint.facts import Facts

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


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
OTHER_PATTERNS = ("linear_attn_config", "attn_type_list", "hybrid_override_pattern", "hybrid_layer_pattern")
"""Keys of patterns with unsupported kinds of layers: Kimi Linear, MiniMax-01, Nemotron-H, MiMo."""


def read_target_cache(config: Facts, num_layers: int) -> TargetCache | None:
    """The cache of a language model from its section of config.json; None for layers of unknown size.

    These are layers of other kinds, and layers that select tokens by an index (DeepSeek V3.2). Raises CheckpointError.
    """
    if any(key in config for key in OTHER_PATTERNS):
        return None
    types = _layer_types(config, num_layers)
    if not set(types) <= {FULL, SLIDING, LINEAR} or "index_head_dim" in config:
        return None
    if "kv_lora_rank" in config:
        return _latent(config, num_layers) if set(types) == {FULL} else None
    own_rows = types[: num_layers - _num_sharing(config, num_layers)]
    full = _full_layers(config, types)
    if full is None:
        return None
    head_dim = config.optional("head_dim", config.integer)
    return TargetCache(
        num_full_layers=own_rows.count(FULL),
        num_sliding_layers=own_rows.count(SLIDING),
        sliding_window=config.integer("sliding_window") if SLIDING in own_rows else 0,
        num_key_value_heads=config.integer("num_key_value_heads"),
        head_dim=head_dim or config.integer("hidden_size") // config.integer("num_attention_heads"),
        full_key_value_heads=full[0],
        full_head_dim=full[1],
        recurrent=_recurrent(config, types.count(LINEAR)) if LINEAR in types else None,
    )


def _layer_types(config: Facts, num_layers: int) -> tuple[str, ...]:
    """`layer_types`, or the pattern that older configurations give instead."""
    if "layer_types" in config:
        types = config.texts("layer_types")
        if len(types) != num_layers:
            raise config.error("layer_types", f"{num_layers} of them (num_hidden_layers)")
        return types
    for key, interleaved in (("full_attention_interval", LINEAR), ("sliding_window_pattern", SLIDING)):
        if key in config:
            every = config.integer(key)
            return tuple(interleaved if i % every else FULL for i in range(1, num_layers + 1))
    if "linear_num_value_heads" in config:
        raise config.error("layer_types", "the kind of each layer, or full_attention_interval")
    return (FULL,) * num_layers


def _num_sharing(config: Facts, num_layers: int) -> int:
    """Number of last layers that reuse the K and V of others (Gemma 4's small models)."""
    key = "num_kv_shared_layers"
    return config.integer(key, minimum=0, maximum=num_layers) if key in config else 0


def _full_layers(config: Facts, types: tuple[str, ...]) -> tuple[int | None, int | None] | None:
    """KV heads and head_dim of full layers that have their own (Gemma 4); None where full layers differ."""
    if "per_layer_config" in config:
        layers = config.section("per_layer_config")
        if layers.keys() != {str(i) for i, kind in enumerate(types) if kind == FULL}:
            return None
        own = [layers.section(key) for key in sorted(layers.keys())]
        shapes = {
            tuple(each.optional(key, each.integer) for key in ("num_key_value_heads", "head_dim")) for each in own
        }
        return shapes.pop() if len(shapes) == 1 else None  # type: ignore[return-value]
    if "attention_k_eq_v" not in config:
        return None, None
    has_own_heads = config.flag("attention_k_eq_v")
    heads = config.optional("num_global_key_value_heads", config.integer) if has_own_heads else None
    return heads, config.integer("global_head_dim")


def _latent(config: Facts, num_layers: int) -> TargetCache:
    """MLA caches a token's compressed K and V and its rotated key part, shared by all heads."""
    width = config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim")
    return TargetCache(
        num_full_layers=num_layers,
        num_sliding_layers=0,
        sliding_window=0,
        num_key_value_heads=1,
        head_dim=width,
        is_latent=True,
    )


def _recurrent(config: Facts, num_layers: int) -> RecurrentState:
    return RecurrentState(
        num_layers=num_layers,
        num_key_heads=config.integer("linear_num_key_heads"),
        num_value_heads=config.integer("linear_num_value_heads"),
        key_head_dim=config.integer("linear_key_head_dim"),
        value_head_dim=config.integer("linear_value_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim"),
    )
