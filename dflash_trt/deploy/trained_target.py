# SPDX-License-Identifier: Apache-2.0
"""The target that a draft was trained for, as far as its checkpoint or the catalogue says so.

Equal shapes do not show that a draft was trained for a target: a draft for another one of the same sizes loads and is
hardly ever accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.source import is_local
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.deploy.catalog import known_draft
from dflash_trt.errors import cut

COPY_PREFIXES = ("", "meta-", "nvidia-")
COPY_WORD = re.compile(
    r"fp8|fp4|nvfp4|mxfp[48]|int[48]|[48]bit|w\d+a\d+(kv\d+)?|awq|gptq|gguf|bnb|mlx|quark|autoround|bf16|dynamic|block"
    r"|quantized|quant|kv|kvfp8|g?\d+g?|v\d+|only|attn|mlp|moe|channel|tensor|torchao|compressed|tensors"
)
"""Words that quantised copies append to a model's name."""


class TrainedTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A target, and where it is named as the one that a draft was trained for."""

    name: str
    source: str
    architectures: tuple[str, ...] = ()
    """Architectures of the target in its config.json; empty where only its name is known."""


def trained_target(draft: str, config: Facts | None) -> TrainedTarget | None:
    """The target of the draft called `draft`: its own verifier in a Speculators file, or else the catalogue's."""
    section = None if config is None else config.peek("speculators_config").get("verifier")
    if isinstance(section, dict) and isinstance(name := section.get("name_or_path"), str) and name:
        found = section.get("architectures")
        architectures = tuple(each for each in found if isinstance(each, str)) if isinstance(found, list) else ()
        return TrainedTarget(name=cut(name), source="speculators_config.verifier", architectures=architectures)
    known = known_draft(draft)
    return None if known is None else TrainedTarget(name=known.target, source="catalogue")


def is_copy(name: str, model: str) -> bool:
    """Whether a repository is a model's own or, by its name, a quantised copy: not -Base, a distillate or fine-tune."""
    short = model.rstrip("/").rpartition("/")[2].lower()
    before, found, after = name.rpartition("/")[2].lower().partition(short)
    words = [word for word in re.split(r"[-_.]", after) if word]
    return bool(found) and before in COPY_PREFIXES and all(map(COPY_WORD.fullmatch, words))


def shapes_fit(draft: str, target: str, trained: TrainedTarget | None) -> str:
    """The verdict on a pair whose shapes fit: what was compared, and what the draft was trained for."""
    known = "not known" if trained is None else f"{trained.name} ({trained.source})"
    return f"{draft}: shapes fit target {target}; trained for: {known}"


def pair_warnings(
    draft: str, spec: DraftSpec, trained: TrainedTarget | None, target: str, partner: TargetCheckpoint
) -> Iterator[str]:
    """Warnings about a pair whose shapes fit: another target than the trained one, and fewer positions."""
    if trained is not None and _is_another(trained, target, partner):
        yield f"{draft} was trained for {trained.name}, not for {target}"
    own, positions = spec.max_position_embeddings, partner.spec.max_position_embeddings
    if own < positions:
        yield (
            f"{draft} has positions for {own} tokens (max_position_embeddings), its target for {positions}: beyond"
            f" {own} tokens, prompt included, dflash-trt decodes without drafts"
        )


def _is_another(trained: TrainedTarget, target: str, partner: TargetCheckpoint) -> bool:
    """Whether `target` is known to be another than the trained one, and no quantised copy of it by its name."""
    architectures = partner.config.values().get("architectures")
    if trained.architectures and isinstance(architectures, list) and not {*architectures} & {*trained.architectures}:
        return True
    return not is_local(target) and not is_copy(target, trained.name)
