# SPDX-License-Identifier: Apache-2.0
"""DSpark: z-lab's layout with a Markov head, and blocks in which every row predicts the token after its own position.

Keys and tensors are those of deepseek-ai/DeepSpec @ afdfa7c9 (deepspec/modeling/dspark/qwen3; its DFlash drafts
dflash_qwen3_*_block7 have markov_rank 0), SpecForge's exports, and vLLM 0.33 (qwen3_dspark.py). Windows and causality
follow DFlash's rules.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dflash_trt.checkpoint.dialects import zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect, renamed
from dflash_trt.checkpoint.dialects.keys import SECTION
from dflash_trt.checkpoint.dialects.shared_keys import PROJECTOR, Places, has_architecture, section_keys
from dflash_trt.checkpoint.draft_spec import CONFIDENCE, MARKOV, DraftSpec, MarkovHead
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Weights

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
OWN_SECTION = "dspark_config"
MAX_RANK = 8192
WITH_MARKOV = "confidence_head_with_markov"
MODELOPTS = "use_confidence_head"
"""Model Optimizer's key, whose confidence head always reads the Markov row, too."""
CONFIDENCE_KEYS = ("enable_confidence_head", MODELOPTS)
NAMES = {
    "markov_w1": f"{MARKOV}.markov_w1", "markov_w2": f"{MARKOV}.markov_w2", "gate_proj": f"{MARKOV}.gate_proj",
    "confidence_proj": f"{CONFIDENCE}.proj",
}  # fmt: skip
"""Modules by the names that Model Optimizer 0.47 exports."""


def recognises(config: Facts) -> bool:
    """Whether it is a DSpark draft on a Qwen3 backbone and not a Speculators file."""
    sections = (section_keys(config, name) for name in (SECTION, OWN_SECTION))
    is_ranked = "markov_rank" in config.keys().union(*sections)
    return _is_named(config) and is_ranked and "speculators_model_type" not in config.values()


def _is_named(config: Facts) -> bool:
    """Whether the architecture is DSpark's, or z-lab's with projector_type dspark (SpecForge's first exports)."""
    is_older = has_architecture(config, zlab.ARCHITECTURE) and config.peek(SECTION).get(PROJECTOR) == "dspark"
    return is_older or has_architecture(config, *ARCHITECTURES)


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a DSpark draft; it has its own embedding and lm_head if there are such tensors."""
    plain = config.replaced(architectures=[zlab.ARCHITECTURE], dflash_config=_section(config))
    config.text("model_type", choices=("qwen3",))
    spec, place = zlab.read(plain, weights, from_anchor=True), Places(plain).of("shift_label")
    if "shift_label" in place and place.flag("shift_label") != spec.sample_from_anchor:
        raise place.conflict("shift_label", f"{str(spec.sample_from_anchor).lower()}, whether row 0 proposes")
    return with_head(spec, read_head(Places(plain).of))


def with_head(spec: DraftSpec, head: MarkovHead | None) -> DraftSpec:
    """`spec` with a Markov head; with a smaller draft vocabulary the head has its rows, too."""
    if head is not None and spec.has_d2t:
        head = msgspec.structs.replace(head, num_rows=spec.draft_vocab_size)
    return msgspec.structs.replace(spec, markov_head=head)


def _section(config: Facts) -> dict[str, object]:
    """Merged dflash_config and dspark_config: trainers write both, DeepSpec writes the keys at the top level."""
    section: dict[str, object] = {}
    for name in (SECTION, OWN_SECTION):
        if name not in config:
            continue
        found = config.section(name)
        for key, value in found.values().items():
            if not found.holds(key, section.setdefault(key, value)):
                raise found.conflict(key, f"the same value as in {SECTION}.{key}")
    return section


def read_head(of: Callable[[str], Facts]) -> MarkovHead | None:
    """Markov and confidence head, None for rank 0; `of` finds a key's place. CheckpointError for unsupported heads."""
    rank = of("markov_rank").integer("markov_rank", minimum=0, maximum=MAX_RANK)
    named = next((key for key in CONFIDENCE_KEYS if key in of(key)), CONFIDENCE_KEYS[0])
    confidence = (switch := of(named)).flag(named, default=False)
    with_markov = of(WITH_MARKOV).flag(WITH_MARKOV, default=named == MODELOPTS)
    if confidence and not (rank and with_markov):
        raise switch.error(named, f"false, or true with {WITH_MARKOV} and a markov_rank")
    if rank == 0:
        of("markov_head_type").optional("markov_head_type", of("markov_head_type").text)
        return None
    kind = (place := of("markov_head_type")).text("markov_head_type", choices=("vanilla", "gated", "rnn"))
    if kind == "rnn":
        raise place.error("markov_head_type", "vanilla or gated, which are computed")
    return MarkovHead(rank=rank, is_gated=kind == "gated", confidence=confidence)


def head_to_config(head: MarkovHead | None) -> dict[str, object]:
    """The keys that `read_head` reads."""
    head_type = "gated" if head is not None and head.is_gated else "vanilla"
    confidence = head is not None and head.confidence
    return {
        "markov_rank": 0 if head is None else head.rank,
        "markov_head_type": head_type,
        "enable_confidence_head": confidence,
        WITH_MARKOV: confidence,
    }


def canonical(weights: Weights, spec: DraftSpec) -> Weights:
    """Renames the heads' tensors of Model Optimizer's exports as DeepSpec's, the others as z-lab's."""

    def name_of(name: str) -> str:
        module, _, suffix = name.rpartition(".")
        return f"{NAMES[module]}.{suffix}" if module in NAMES else name

    return zlab.canonical(renamed(weights, name_of), spec)


DSPARK = Dialect(name="dspark", recognises=recognises, read=read, is_canonical=True, canonical=canonical)
