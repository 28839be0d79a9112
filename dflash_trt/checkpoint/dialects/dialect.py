# SPDX-License-Identifier: Apache-2.0
"""What a dialect of draft checkpoints is, and the keys that all dialects share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dflash_trt.checkpoint.dialects.keys import SECTION
from dflash_trt.checkpoint.draft_spec import D2T, EMBEDDING, HEAD, DraftLayer, DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.errors import CheckpointError

# Far beyond any draft: a slip in config.json is refused before it fills the memory (layers, rotary tables).
MAX_LAYERS, MAX_BLOCK_SIZE, MAX_POSITIONS = 1024, 1024, 2**24
T2D = "t2d"
FULL, SLIDING = "full_attention", "sliding_attention"

Weights = dict[str, StoredTensor]


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How one family of exporters writes DFlash drafts."""

    name: str
    recognises: Callable[[Facts], bool]
    """Whether a config.json is of this dialect; it reads nothing but keys, and raises nothing."""
    read: Callable[[Facts, Weights], DraftSpec]
    """The facts of config.json, and of which tensors there are where only that says something.

    Raises CheckpointError for a fact that is missing, contradictory or not understood.
    """
    is_canonical: bool
    """Whether keys and tensors are z-lab's, so that writers keep them unchanged."""
    load: Callable[[Path], Weights] = read_weights
    """All tensors of the directory, as they are called there; raises CheckpointError."""
    canonical: Callable[[Weights, DraftSpec], Weights] = lambda weights, _: weights
    """Renames tensors to canonical names; an unknown one keeps its name, and is refused later as unused."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a draft is written in a dialect that other tools read."""

    name: str
    to_config: Callable[[DraftSpec, str], dict[str, object]]
    """config.json from facts and torch's name of the dtype; raises CheckpointError for what it cannot represent."""
    stored: Callable[[Weights], Weights] = lambda weights: weights
    """Canonical tensors by the names they have there."""
    holds_quantised: bool = True
    """Whether its readers know modelopt's quantised tensors."""


class Places:
    """config.json and its dflash_config: a fact stands in one of them, or in both with the same value."""

    def __init__(self, config: Facts) -> None:
        self.config = config
        self.dflash = config.section(SECTION)

    def of(self, key: str) -> Facts:
        """Where `key` stands: dflash_config (newer files) or the top level (older files); never two values."""
        if not self.dflash.agrees(self.config, key):
            raise self.config.conflict(key, f"the same value as in {SECTION}.{key}")
        return self.dflash if key in self.dflash else self.config

    def read_facts(self) -> dict[str, Any]:
        """The fields of DraftSpec that z-lab's layout and its nearest descendants have in common."""
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
    """Ids of the added tokens of a tokenizer.json by their text; none where there is no such file."""
    if not file.is_file():
        return {}
    listed = Facts.load(file, what="a tokenizer").values().get("added_tokens")
    tokens = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return {each["content"]: each["id"] for each in tokens if isinstance(each.get("content"), str) and "id" in each}


def has_architecture(config: Facts, *names: str) -> bool:
    """Whether one of `names` is the architecture, or among them."""
    return not set(names).isdisjoint(architectures(config))


def architectures(config: Facts) -> list[str]:
    """The names at `architectures`; none where something else stands there."""
    found = config.values().get("architectures")
    return [name for name in (found if isinstance(found, list) else [found]) if isinstance(name, str)]


def section_keys(config: Facts, key: str) -> set[str]:
    """The keys of the object at `key`; none where there is no object."""
    return {name for name, value in config.peek(key).items() if value is not None}


def read_backbone(config: Facts) -> dict[str, Any]:
    """The fields of DraftSpec that every dialect writes as Qwen3's configuration does.

    Raises CheckpointError where heads or rotary pairs do not come out even.
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
    """`mask_token_id`, a row of the embedding."""
    mask_token_id = place.integer("mask_token_id", minimum=0)
    if mask_token_id >= vocab_size:
        raise place.error("mask_token_id", f"a token id below vocab_size {vocab_size}")
    return mask_token_id


def taps(place: Facts, key: str = "target_layer_ids", *, first: int = 0) -> tuple[int, ...]:
    """The taps, by rising layer; `first` is the number under which the dialect knows layer 0's output."""
    ids = place.integers(key)
    if len(set(ids)) < len(ids):
        raise place.error(key, "each layer once")
    if list(ids) != sorted(ids):  # runtimes feed fc in the order of the layers
        raise place.error(key, "layers in rising order, and fc.weight's columns in the same")
    if ids[0] < first:
        raise place.error(key, f"ids from {first} on (the residual stream that enters a decoder layer)")
    return tuple(i - first for i in ids)


class LayerType(NamedTuple):
    """What layer_types says of a layer, and the window that then holds."""

    slides: bool
    window: int | None
    """None where the layer is full, or windows are switched off."""


def layer_types(config: Facts) -> list[LayerType]:
    """The type of each layer, from layer_types and sliding_window; without layer_types every layer is full.

    use_sliding_window false switches windows off, not the type's causality (transformers 5.24, Qwen3Config; z-lab's
    dflash 0.1.0).
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


def own_vocabulary(config: Facts, weights: Weights, vocab_size: int) -> dict[str, Any]:
    """Whether embedding and head are the draft's own: as has_embed_tokens and has_lm_head say, or the tensors."""
    has_head = config.flag("has_lm_head", default=f"{HEAD}.weight" in weights)
    rows = config.optional("draft_vocab_size", config.integer) or vocab_size
    if rows > vocab_size or (rows < vocab_size and not has_head):
        raise config.conflict("draft_vocab_size", f"vocab_size {vocab_size}, or less with an lm_head")
    return {
        "own_embedding": config.flag("has_embed_tokens", default=EMBEDDING in weights),
        "draft_vocab_size": rows if has_head else None,
    }


def renamed(weights: Weights, new_name: Callable[[str], str]) -> Weights:
    """The tensors under other names; raises CheckpointError where two would have the same."""
    result: Weights = {}
    for name, tensor in weights.items():
        if (new := new_name(name)) in result:
            raise CheckpointError(f"{tensor.file}: tensor {name!r}: expected no other {new!r}, found one besides")
        result[new] = msgspec.structs.replace(tensor, name=new)
    return result


def without_t2d(weights: Weights, spec: DraftSpec) -> Weights:
    """The tensors without t2d, which says the same as d2t; CheckpointError where it does not."""
    left = dict(weights)
    if spec.has_d2t and T2D in left and D2T in left:
        _check_t2d(left.pop(T2D), left[D2T], spec)
    return left


def _check_t2d(t2d: StoredTensor, d2t: StoredTensor, spec: DraftSpec) -> None:
    """Raises CheckpointError unless t2d marks the tokens that d2t names; d2t itself is checked with all tensors."""
    if (t2d.dtype, t2d.shape) != ("BOOL", (spec.vocab_size,)):
        raise CheckpointError(
            f"{t2d.file}: tensor {T2D!r}: expected BOOL {[spec.vocab_size]}, found {t2d.dtype} {list(t2d.shape)}"
        )
    if (d2t.dtype, d2t.shape) != ("I64", (spec.draft_vocab_size,)):
        return
    import numpy as np

    marked = np.memmap(t2d.file, "u1", mode="r", offset=t2d.offset, shape=t2d.shape)
    offsets = np.memmap(d2t.file, "<i8", mode="r", offset=d2t.offset, shape=d2t.shape)
    named = np.sort(offsets + np.arange(len(offsets)))
    if not np.array_equal(np.flatnonzero(marked), named):
        raise CheckpointError(
            f"{t2d.file}: tensor {T2D!r}: expected the {len(named)} tokens that d2t names, found"
            f" {int(np.count_nonzero(marked))}, and not just these"
        )


def windows_of(spec: DraftSpec) -> set[int]:
    """The windows that layers of `spec` have."""
    return {layer.sliding_window for layer in spec.layers if layer.sliding_window is not None}


def refuse_unless(layout: str, spec: DraftSpec, plain: Mapping[str, object]) -> None:
    """Raises CheckpointError for the first fact of `spec` that is not as in `plain`."""
    for fact, expected in plain.items():
        if getattr(spec, fact) != expected:
            raise unrepresentable(layout, fact, repr(expected), getattr(spec, fact))


def unrepresentable(layout: str, fact: str, expected: str, found: object) -> CheckpointError:
    """The error for a fact that a layout cannot represent."""
    return CheckpointError(
        f"{fact}: expected {expected}, which is what the layout {layout} can represent, found {found}"
    )
