# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that several dialects share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.dialects.keys import SECTION
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.rope_config import read_rope

# Far beyond any draft: a typo in config.json is refused before layers or rotary tables fill the memory.
MAX_LAYERS, MAX_BLOCK_SIZE, MAX_POSITIONS = 1024, 1024, 2**24
PROJECTOR = "projector_type"


class Places:
    """config.json and its dflash_config: a fact is in one of them, or in both with the same value."""

    def __init__(self, config: Facts) -> None:
        self.config = config
        self.dflash = config.section(SECTION)

    def of(self, key: str) -> Facts:
        """The place of `key`: dflash_config (newer files) or the top level (older files), never two values."""
        if not self.dflash.agrees(self.config, key):
            raise self.config.conflict(key, f"the same value as in {SECTION}.{key}")
        return self.dflash if key in self.dflash else self.config

    def read_facts(self) -> dict[str, Any]:
        """The fields of DraftSpec that z-lab's layout and its closest descendants share."""
        vocab_size, count = self.config.integer("vocab_size"), self.of("num_target_layers")
        return read_backbone(self.config) | {
            "attention_bias": self.config.flag("attention_bias"),
            "vocab_size": vocab_size,
            "block_size": self.of("block_size").integer("block_size", minimum=2, maximum=MAX_BLOCK_SIZE),
            "mask_token_id": self._mask_token(vocab_size),
            "target_layer_ids": taps(self.of("target_layer_ids")),
            "num_target_layers": count.optional("num_target_layers", count.integer),
        }

    def _mask_token(self, vocab_size: int) -> int:
        """`mask_token_id`, or else the id of the string `mask_token` in the tokenizer beside config.json."""
        text, place = self.of("mask_token"), self.of("mask_token_id")
        token = text.optional("mask_token", text.text)
        if "mask_token_id" in place or token is None:
            return mask_token(place, vocab_size)
        ids = added_tokens(self.config.file.with_name("tokenizer.json"))
        if token not in ids:
            hint = "add mask_token_id, its id in the target's tokenizer, to config.json"
            raise text.error("mask_token", "mask_token_id besides, or the token in a tokenizer.json", hint)
        return mask_token(place.replaced(mask_token_id=ids[token]), vocab_size)


def added_tokens(file: Path) -> dict[str, int]:
    """Ids of a tokenizer.json's added tokens by their text; empty without the file."""
    if not file.is_file():
        return {}
    listed = Facts.load(file, what="a tokenizer").values().get("added_tokens")
    tokens = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return {each["content"]: each["id"] for each in tokens if isinstance(each.get("content"), str) and "id" in each}


def has_architecture(config: Facts, *names: str) -> bool:
    """Whether one of `names` is among the architectures."""
    return not set(names).isdisjoint(architectures(config))


def architectures(config: Facts) -> list[str]:
    """The names at `architectures`; empty where there are none."""
    found = config.values().get("architectures")
    return [name for name in (found if isinstance(found, list) else [found]) if isinstance(name, str)]


def section_keys(config: Facts, key: str) -> set[str]:
    """The keys of the object at `key`; empty where there is no object."""
    return {name for name, value in config.peek(key).items() if value is not None}


def named(name: str, *sizes: str) -> Callable[[Facts], bool]:
    """Recognises `name` in an architecture, the projector, Speculators' type or a key, or one of the keys `sizes`."""

    def recognises(config: Facts) -> bool:
        projector, algorithm = config.peek(SECTION).get(PROJECTOR), config.values().get("speculators_model_type")
        keys = config.keys() | section_keys(config, SECTION)
        return (
            any(name in architecture.lower() for architecture in architectures(config))
            or name in (projector, algorithm)
            or any(key in sizes or key.startswith(f"{name}_") for key in keys)
        )

    return recognises


def read_backbone(config: Facts) -> dict[str, Any]:
    """The fields of DraftSpec that every dialect spells as Qwen3's configuration does.

    Raises CheckpointError where heads do not divide evenly or rotated dimensions are not pairs.
    """
    config.text("hidden_act", choices=("silu",))
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    backbone: dict[str, Any] = {name: config.integer(name) for name in sizes}
    heads, head_dim, rope = backbone["num_attention_heads"], config.integer("head_dim", minimum=2), read_rope(config)
    if heads % backbone["num_key_value_heads"]:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    if head_dim % 2:
        raise config.error("head_dim", "an even number (rotary pairs)")
    if (rotary := rope.rotary_dim(head_dim)) < 2 or rotary % 2:
        raise config.error("partial_rotary_factor", f"one that turns an even number of {head_dim} dimensions")
    return backbone | {
        "head_dim": head_dim,
        "rms_norm_eps": config.number("rms_norm_eps"),
        "rope": rope,
        "max_position_embeddings": config.integer("max_position_embeddings", maximum=MAX_POSITIONS),
    }


def mask_token(place: Facts, vocab_size: int) -> int:
    """`mask_token_id`; CheckpointError for one outside of the vocabulary."""
    mask_token_id = place.integer("mask_token_id", minimum=0)
    if mask_token_id >= vocab_size:
        raise place.error("mask_token_id", f"a token id below vocab_size {vocab_size}")
    return mask_token_id


def taps(place: Facts, key: str = "target_layer_ids", *, first: int = 0) -> tuple[int, ...]:
    """The taps in ascending order; `first` is the dialect's number for the output of layer 0."""
    ids = place.integers(key)
    if len(set(ids)) < len(ids):
        raise place.error(key, "each layer once")
    if list(ids) != sorted(ids):  # runtimes feed fc in the order of the layers
        raise place.error(key, "layers in rising order, and fc.weight's columns in the same")
    if ids[0] < first:
        raise place.error(key, f"ids from {first} on (the residual stream that enters a decoder layer)")
    return tuple(i - first for i in ids)
