# SPDX-License-Identifier: Apache-2.0
"""Our own: z-lab's layout with canonical names, and a section `dflash_trt` for facts that it has no words for.

The architecture is another, so that runtimes that do not know the section refuse the file instead of losing it.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from dflash_trt.checkpoint.dialects import dflash2, zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect, Weights, config_equals, windows
from dflash_trt.checkpoint.draft_spec import (
    BIASED,
    BlockConv,
    DraftLayer,
    DraftSpec,
    GateWidth,
    MarkovHead,
    Positive,
    SelectorSizes,
)
from dflash_trt.checkpoint.facts import MAX_INTEGER, Facts
from dflash_trt.errors import CheckpointError

ARCHITECTURE, SECTION = "DFlashTrtDraftModel", "dflash_trt"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The facts of `DraftSpec` for which z-lab's layout has no words, by the same names."""

    model_type: str
    layers: tuple[DraftLayer, ...] | None = None
    """Where z-lab's keys cannot say them."""
    biases: tuple[str, ...] = ()
    value_scale: float = 1
    tap_hidden_size: Positive | None = None
    tap_norms: bool = False
    context_input_layernorm: bool = False
    attention_gate: GateWidth | None = None
    own_embedding: bool = False
    mask_embedding: bool = False
    draft_vocab_size: Positive | None = None
    block_conv: BlockConv | None = None
    candidate_selector: SelectorSizes | None = None
    markov_head: MarkovHead | None = None
    sample_from_anchor: bool = False
    vocabulary_is_unknown: bool = False
    """Whether the size of the target's vocabulary is, so that `vocab_size` says nothing."""


SAME_NAMES = tuple(name for name in Section.__struct_fields__ if name not in ("layers", "vocabulary_is_unknown"))


def recognises(config: Facts) -> bool:
    """Whether the architecture is ours."""
    return config_equals(config, "architectures", ARCHITECTURE)


def read(config: Facts, weights: Weights) -> DraftSpec:
    """z-lab's facts, and those of the section."""
    try:
        section = msgspec.convert(config.section(SECTION).values(), Section)
    except msgspec.ValidationError as error:
        raise config.error(SECTION, f"facts of a draft ({error})") from None
    plain = config.values() | {"architectures": [zlab.ARCHITECTURE], "model_type": "qwen3"}
    if section.vocabulary_is_unknown:
        plain["vocab_size"] = MAX_INTEGER
    spec = zlab.read_layout(Facts(plain, config.file), zlab.KEYS, windows(config))
    _check(config, section, spec)
    return msgspec.structs.replace(
        spec,
        **{name: getattr(section, name) for name in SAME_NAMES},
        layers=section.layers or spec.layers,
        vocab_size=None if section.vocabulary_is_unknown else spec.vocab_size,
    )


def _check(config: Facts, section: Section, spec: DraftSpec) -> None:
    """What one field says of another."""
    place, rows = config.section(SECTION), section.draft_vocab_size
    if rows is not None and rows > (spec.vocab_size or 0):
        raise place.error("draft_vocab_size", f"an integer from 1 to vocab_size {spec.vocab_size}")
    place.number("value_scale", default=1)
    if not set(section.biases) <= set(BIASED):
        raise place.error("biases", f"some of {', '.join(BIASED)}")
    conv, selector = section.block_conv, section.candidate_selector
    if conv is not None and spec.hidden_size % conv.group_size:
        raise place.error("block_conv", f"groups that divide hidden_size {spec.hidden_size}")
    if selector is not None and selector.top_k > (rows or spec.vocab_size or 0):
        raise place.error("candidate_selector", "at most as many candidates as the head has rows")
    if section.layers is not None and len(section.layers) != spec.num_layers:
        raise place.error("layers", f"num_hidden_layers {spec.num_layers} of them")


def to_config(spec: DraftSpec, dtype: str) -> dict[str, object]:
    """config.json for `spec`, whose tensors are of torch's type `dtype`; z-lab's to the letter where that suffices."""
    with suppress(CheckpointError):
        return dflash2.to_config(spec, dtype)
    layers = spec.layers if zlab.layers_problem(spec.layers) else None
    plain_layers = tuple(DraftLayer(sliding_window=None, causal=False) for _ in spec.layers) if layers else spec.layers
    unknown = spec.vocab_size is None
    plain = msgspec.structs.replace(
        spec, model_type="qwen3", layers=plain_layers, vocab_size=spec.vocab_size or MAX_INTEGER, **zlab.PLAIN
    )
    facts = {name: getattr(spec, name) for name in SAME_NAMES}
    section = msgspec.to_builtins(Section(layers=layers, vocabulary_is_unknown=unknown, **facts))
    return zlab.to_config(plain, dtype) | {"architectures": [ARCHITECTURE], SECTION: section}


OWN = Dialect(name="dflash-trt", recognises=recognises, read=read, is_canonical=True)
