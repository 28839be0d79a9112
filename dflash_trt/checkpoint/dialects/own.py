# SPDX-License-Identifier: Apache-2.0
"""Our own dialect: z-lab's layout, and a section `dflash_trt` for facts that z-lab's keys cannot express.

The architecture has another name, so that runtimes that do not know the section refuse the file.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from dflash_trt.checkpoint.dialects import zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect
from dflash_trt.checkpoint.dialects.layouts import zlab_config
from dflash_trt.checkpoint.dialects.shared_keys import recognised_by
from dflash_trt.checkpoint.draft_spec import BIASED, DraftLayer, DraftSpec
from dflash_trt.checkpoint.facts import MAX_INTEGER, Facts
from dflash_trt.checkpoint.safetensors_file import Weights
from dflash_trt.errors import CheckpointError

ARCHITECTURE, SECTION = "DFlashTrtDraftModel", "dflash_trt"
FACTS = ("model_type", "layers", *zlab.PLAIN)
"""Fields of `DraftSpec` that may stand in the section; layers only where z-lab's keys cannot express them."""
UNKNOWN = "vocabulary_is_unknown"
"""The section's flag for an unknown size of the target's vocabulary; `vocab_size` is then a placeholder."""


def read(config: Facts, weights: Weights) -> DraftSpec:
    """z-lab's facts, and those of the section."""
    section = config.section(SECTION)
    is_unknown = section.flag(UNKNOWN, default=False)
    plain = config.replaced(architectures=[zlab.ARCHITECTURE], model_type="qwen3")
    if is_unknown:
        plain = plain.replaced(vocab_size=MAX_INTEGER)
    zlabs = zlab.read(plain, {})
    facts = {name: fact for name, fact in section.values().items() if name != UNKNOWN}
    if unknown := sorted(facts.keys() - set(FACTS)):
        raise section.error(unknown[0], f"only the facts {', '.join(FACTS)}")
    section.text("model_type")
    try:
        spec = msgspec.convert(msgspec.to_builtins(zlabs) | facts, DraftSpec)
    except msgspec.ValidationError as error:
        raise config.error(SECTION, f"facts of a draft ({error})") from None
    _check(section, spec, zlabs.num_layers)
    return msgspec.structs.replace(spec, vocab_size=None) if is_unknown else spec


def _check(section: Facts, spec: DraftSpec, num_layers: int) -> None:
    """Raises CheckpointError where facts of the section contradict each other."""
    rows, conv, selector = spec.draft_vocab_size, spec.block_conv, spec.candidate_selector
    if rows is not None and rows > (spec.vocab_size or 0):
        raise section.error("draft_vocab_size", f"an integer from 1 to vocab_size {spec.vocab_size}")
    section.number("value_scale", default=1)
    if not set(spec.biases) <= set(BIASED):
        raise section.error("biases", f"some of {', '.join(BIASED)}")
    if conv is not None and spec.hidden_size % conv.group_size:
        raise section.error("block_conv", f"groups that divide hidden_size {spec.hidden_size}")
    if selector is not None and selector.top_k > (rows or spec.vocab_size or 0):
        raise section.error("candidate_selector", "at most as many candidates as the head has rows")
    if spec.lilicorr is not None and spec.lilicorr.hidden_size % spec.lilicorr.num_heads:
        raise section.error("lilicorr", "heads that divide its hidden_size")
    if len(spec.layers) != num_layers:
        raise section.error("layers", f"num_hidden_layers {num_layers} of them")


def to_config(spec: DraftSpec, dtype: str) -> dict[str, object]:
    """config.json for `spec`, whose tensors are of torch's type `dtype`; plain z-lab's where that suffices."""
    with suppress(CheckpointError):
        return zlab_config(spec, dtype)
    has_layers = zlab.layers_problem(spec.layers) is not None
    plain_layers = tuple(DraftLayer(sliding_window=None, causal=False) for _ in spec.layers)
    plain = msgspec.structs.replace(
        spec,
        model_type="qwen3",
        layers=plain_layers if has_layers else spec.layers,
        vocab_size=spec.vocab_size or MAX_INTEGER,
        **zlab.PLAIN,
    )
    facts: dict[str, Any] = msgspec.to_builtins(spec)
    section = {name: facts[name] for name in FACTS if name in facts and (name != "layers" or has_layers)}
    if spec.vocab_size is None:
        section[UNKNOWN] = True
    return zlab.to_config(plain, dtype) | {"architectures": [ARCHITECTURE], SECTION: section}


OWN = Dialect(name="dflash-trt", recognises=recognised_by(architectures=(ARCHITECTURE,)), read=read, is_canonical=True)
