# SPDX-License-Identifier: Apache-2.0
"""The catalogue of known drafts: `dflash-trt inspect --catalog`, and docs/checkpoints.md (tools/catalog_page.py).

Facts of a draft stand in checkpoints.json, which plans deployments, or beside it in catalog.json; the memory follows
from them. What is not known is None, and said.
"""

from __future__ import annotations

from functools import cache

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.quantization import FP8, NVFP4
from dflash_trt.checkpoint.source import is_local
from dflash_trt.deploy.gpus import DATA
from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.sizes import DraftSizes
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json


class Speedup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What somebody published."""

    ratio: float
    """Against decoding without a draft; below 1 is a loss."""
    setting: str
    source: str


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is common to drafts of one architecture."""

    dialect: str | None
    """None where it is not read here, or not known."""
    runtimes: dict[str, str]
    """Who serves it, and why not otherwise; a runtime that is not named is not known."""
    verified: str
    """What was verified here, with a small model of the same architecture."""


class KnownDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One draft checkpoint."""

    draft: str
    """Repository id, or where only that is known, what it is called."""
    target: str
    family: str
    spec: PartialDraftSpec | None = None
    """Where checkpoints.json has none."""
    source: str | None = None
    """Of `spec`, or why there is none; None: checkpoints.json's."""
    licence: str | None = None
    """Where it forbids commercial use; None is another one, or not known."""
    deployments: tuple[str, ...]
    """Files in build_configs/."""
    speedups: tuple[Speedup, ...]

    @property
    def facts(self) -> PartialDraftSpec | None:
        """What is known of its architecture."""
        published = published_drafts().get(self.draft)
        return self.spec if published is None else published.spec

    def weight_bytes(self) -> dict[str, int] | None:
        """Of the layers by precision, the rest always in BF16; None where the facts are not known."""
        if (spec := self.facts) is None:
            return None
        sizes = DraftSizes(name=self.draft, spec=spec)
        layers = [module for module in spec.linear_shapes() if module.startswith("layers.")]
        algorithms: dict[str, dict[str, str]] = {"BF16": {}} | {a: dict.fromkeys(layers, a) for a in (FP8, NVFP4)}
        return {name: sizes.weight_bytes(chosen, ranks=1) for name, chosen in algorithms.items()}


class Catalog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All known drafts."""

    source: str
    families: dict[str, Family]
    drafts: tuple[KnownDraft, ...]


@cache
def catalog() -> Catalog:
    """The package's catalogue."""
    return read_json(DATA / "catalog.json", Catalog, ConfigError, what="the package's data")


def trained_for(draft: str, target: str) -> str | None:
    """The known target of a repository `draft`, where `target` is another repository.

    One that has the known one's name within its own, as quantised copies have, is taken for a copy.
    """
    usual_target = next((each.target for each in catalog().drafts if each.draft == draft), None)
    if usual_target is None or is_local(target) or usual_target.rpartition("/")[2].lower() in target.lower():
        return None
    return usual_target


def entry(draft: KnownDraft) -> dict[str, object]:
    """One draft for JSON: facts, memory, and what holds for its family."""
    family = catalog().families[draft.family]
    return {
        **msgspec.structs.asdict(draft),
        "spec": draft.facts,
        "weight_bytes": draft.weight_bytes(),
        **msgspec.structs.asdict(family),
    }


COLUMNS = ("draft", "target", "layers", "H", "heads", "S", "taps", "BF16", "FP8", "NVFP4")


def row(draft: KnownDraft) -> tuple[str, ...]:
    """The same for a table; "?" is not known."""
    facts, sizes = draft.facts, draft.weight_bytes()
    if facts is None or sizes is None:
        return (draft.draft, draft.target, *["?"] * (len(COLUMNS) - 2))
    heads = f"{facts.num_attention_heads}-{facts.num_key_value_heads} ({facts.head_dim})"
    taps = ", ".join(map(str, facts.target_layer_ids))
    numbers = (facts.num_layers, facts.hidden_size, heads, facts.block_size, taps)
    return (draft.draft, draft.target, *map(str, numbers), *(f"{size / 1e9:.2f} GB" for size in sizes.values()))
