# SPDX-License-Identifier: Apache-2.0
"""DSpark: z-lab's layout with a Markov head, and blocks in which every row predicts the token after its own position.

Keys and tensors as in deepseek-ai/DeepSpec @ afdfa7c9 (deepspec/modeling/dspark/qwen3), whose own DFlash drafts
(dflash_qwen3_*_block7) are the same with markov_rank 0, in SpecForge's exports, and in vLLM 0.33 (qwen3_dspark.py),
whose rules for windows and causality are those of DFlash.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dflash_trt.checkpoint.dialects import zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect, Places, Weights, has_architecture, section_keys
from dflash_trt.checkpoint.dialects.keys import SECTION
from dflash_trt.checkpoint.draft_spec import DraftSpec, MarkovHead
from dflash_trt.checkpoint.facts import Facts

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
OWN_SECTION = "dspark_config"
PROJECTOR = "projector_type"
MAX_RANK = 8192
WITH_MARKOV = "confidence_head_with_markov"


def recognises(config: Facts) -> bool:
    """Whether it is a DSpark draft on a Qwen3 backbone, in a file of its own."""
    sections = (section_keys(config, name) for name in (SECTION, OWN_SECTION))
    is_ranked = "markov_rank" in config.keys().union(*sections)
    return _is_named(config) and is_ranked and "speculators_model_type" not in config.values()


def _is_named(config: Facts) -> bool:
    """By its architecture, or as SpecForge's first exports were: z-lab's architecture and the projector's name."""
    is_older = has_architecture(config, zlab.ARCHITECTURE) and config.peek(SECTION).get(PROJECTOR) == "dspark"
    return is_older or has_architecture(config, *ARCHITECTURES)


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a DSpark draft; its tensors say whether embedding and lm_head are its own."""
    plain = config.replaced(architectures=[zlab.ARCHITECTURE], dflash_config=_section(config))
    config.text("model_type", choices=("qwen3",))
    spec = zlab.read(plain, weights, from_anchor=True)
    return with_head(spec, read_head(Places(plain).of))


def with_head(spec: DraftSpec, head: MarkovHead | None) -> DraftSpec:
    """`spec` with a Markov head, whose rows are those of its own smaller vocabulary where it has one."""
    if head is not None and spec.has_d2t:
        head = msgspec.structs.replace(head, num_rows=spec.draft_vocab_size)
    return msgspec.structs.replace(spec, markov_head=head)


def _section(config: Facts) -> dict[str, object]:
    """Keys of dflash_config and dspark_config, which trainers write both; DeepSpec's stand at the top."""
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
    """The heads, None for rank 0, read where `of` says that a key stands; CheckpointError for one that does not run."""
    rank = of("markov_rank").integer("markov_rank", minimum=0, maximum=MAX_RANK)
    confidence = (switch := of("enable_confidence_head")).flag("enable_confidence_head", default=False)
    with_markov = of(WITH_MARKOV).flag(WITH_MARKOV, default=False)
    if confidence and not (rank and with_markov):
        raise switch.error("enable_confidence_head", f"false, or true with {WITH_MARKOV} and a markov_rank")
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


DSPARK = Dialect(name="dspark", recognises=recognises, read=read, is_canonical=True, canonical=zlab.canonical)
