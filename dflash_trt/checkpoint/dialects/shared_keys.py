# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that several dialects share, and windows and causality of layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dflash_trt.checkpoint.dialects.keys import SECTION
from dflash_trt.checkpoint.draft_spec import DraftLayer, DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.rope import read_rope

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


def recognised_by(
    *, architectures: Collection[str] = (), keys: Collection[str] = (), section: Collection[str] = (),
    values: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Facts], bool]:  # fmt: skip
    """Recognises one of these architectures, keys, keys `section` of dflash_config, or keys with their `values`."""

    def recognises(config: Facts) -> bool:
        return (
            has_architecture(config, *architectures)
            or not config.keys().isdisjoint(keys)
            or not section_keys(config, SECTION).isdisjoint(section)
            or any(config.holds(key, value) for key, value in values.items())
        )

    return recognises


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


FULL, SLIDING = "full_attention", "sliding_attention"


class LayerType(NamedTuple):
    """A layer's entry in layer_types, with its window."""

    slides: bool
    window: int | None
    """None where the layer is full, or windows are switched off."""


def layer_types(config: Facts) -> list[LayerType]:
    """Each layer's type; without layer_types every layer is full.

    use_sliding_window false switches windows off, but not the causality of sliding layers (transformers 5.24,
    Qwen3Config; z-lab's dflash 0.1.0).
    """
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if "layer_types" not in config and config.flag("use_sliding_window", default=False):
        raise config.error("use_sliding_window", "layer_types, which say where the window applies")
    types = config.texts("layer_types") if "layer_types" in config else (FULL,) * num_layers
    if len(types) != num_layers or not set(types) <= {FULL, SLIDING}:
        raise config.error("layer_types", f"{num_layers} times {FULL} or {SLIDING}")
    has_windows = config.flag("use_sliding_window", default=True) and SLIDING in types
    window = config.integer("sliding_window") if has_windows else None
    return [LayerType(kind == SLIDING, window if kind == SLIDING else None) for kind in types]


def layers(
    types: Sequence[LayerType], causal: bool | None, sinks: Sequence[bool] | bool = False
) -> tuple[DraftLayer, ...]:
    """Window, causality and sinks by layer; `causal` None: sliding layers are causal, full ones are not."""
    have = [sinks] * len(types) if isinstance(sinks, bool) else sinks
    return tuple(
        DraftLayer(sliding_window=each.window, causal=each.slides if causal is None else causal, sinks=has_sinks)
        for each, has_sinks in zip(types, have, strict=True)
    )


def windows_of(spec: DraftSpec) -> set[int]:
    """The different windows of the layers of `spec`."""
    return {layer.sliding_window for layer in spec.layers if layer.sliding_window is not None}
