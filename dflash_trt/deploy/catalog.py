# SPDX-License-Identifier: Apache-2.0
"""The catalogue of known drafts: `dflash-trt drafts`, and docs/checkpoints.md (tools/catalog_page.py).

Facts of a draft are in checkpoints.json, which plans deployments, or otherwise in catalog.json; the memory follows from
them. Unknown facts are None, and are shown as unknown.
"""

from __future__ import annotations

from functools import cache

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.draft_tensors import linear_shapes
from dflash_trt.checkpoint.number_formats import FP8, NVFP4
from dflash_trt.deploy.gpus import DATA, own_gpu
from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.sizes import DraftSizes
from dflash_trt.files.json_file import package_data


class Speedup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published measurement."""

    ratio: float
    """Speed relative to decoding without a draft."""
    setting: str
    source: str


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts common to the drafts of one architecture."""

    dialect: str | None
    """None for an unknown dialect, or one that is not read here."""
    runtimes: dict[str, str]
    """Version that serves it, or the reason that none does, by runtime; unknown for runtimes not listed."""
    verified: str
    """Tests run here on a small model of the same architecture."""


class KnownDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One draft checkpoint."""

    draft: str
    """Repository id, or a name if no repository is known."""
    target: str
    family: str
    spec: PartialDraftSpec | None = None
    """Facts of a draft that checkpoints.json lacks."""
    source: str | None = None
    """Source of `spec`, or the reason that there is none; None where checkpoints.json has both."""
    read: str
    """Date on which `source`, or the catalogue's, was read: a month, or a day."""
    kind: str | None = None
    """`DraftSpec.kind` of a draft whose facts are not known."""
    mode: str | None = None
    """Chat mode that it was trained for, where that is said."""
    tau: str | None = None
    """Published tau, and where."""
    licence: str | None = None
    """Licence that forbids commercial use; None for any other, or an unknown one."""
    deployments: tuple[str, ...]
    """Files in build_configs/."""
    speedups: tuple[Speedup, ...]

    @property
    def facts(self) -> PartialDraftSpec | None:
        """Known facts of its architecture."""
        published = published_drafts().get(self.draft)
        return self.spec if published is None else published.spec

    @property
    def kind_name(self) -> str:
        """Kind of the draft, from its facts if they are known."""
        return self.kind or "?" if self.facts is None else self.facts.kind

    def weight_bytes(self) -> dict[str, int] | None:
        """Bytes of all weights by precision of the layers; None where the facts are not known."""
        if (spec := self.facts) is None:
            return None
        sizes = DraftSizes(name=self.draft, spec=spec)
        layers = [module for module in linear_shapes(spec) if module.startswith("layers.")]
        algorithms: dict[str, dict[str, str]] = {"BF16": {}} | {a: dict.fromkeys(layers, a) for a in (FP8, NVFP4)}
        return {name: sizes.weight_bytes(chosen, ranks=1) for name, chosen in algorithms.items()}


class Gain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Published gain of one kind of drafts over decoding without speculation."""

    proposes: str
    """How it chooses the tokens of a block."""
    tau: float
    speedup: float


class Kinds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gains of the kinds, by `DraftSpec.kind`, measured by others in one setting."""

    setting: str
    gains: dict[str, Gain]


class Catalog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All known drafts."""

    source: str
    kinds: Kinds
    families: dict[str, Family]
    drafts: tuple[KnownDraft, ...]


@cache
def catalog() -> Catalog:
    """The package's catalogue."""
    return package_data(DATA / "catalog.json", Catalog)


def known_draft(draft: str) -> KnownDraft | None:
    """The catalogue's entry of a repository id, in any case."""
    return next((each for each in catalog().drafts if each.draft.lower() == draft.lower()), None)


def needs_thinking_off(draft: str | None) -> bool:
    """Whether a draft was trained on answers without thinking, by the catalogue: others it predicts poorly."""
    return draft is not None and (known := known_draft(draft)) is not None and known.mode == "without thinking"


def drafts_for(target: str) -> tuple[KnownDraft, ...]:
    """The known drafts of a target, or else of the one whose copy it is by its name (as of a quantised target)."""
    known = catalog().drafts
    if exact := tuple(draft for draft in known if draft.target.lower() == target.lower()):
        return exact
    name = target.rstrip("/").rpartition("/")[2].lower()
    copies = {draft.target for draft in known if draft.target.rpartition("/")[2].lower() in name}
    longest = max((each.rpartition("/")[2] for each in copies), key=len, default=None)
    return tuple(draft for draft in known if draft.target in copies and draft.target.rpartition("/")[2] == longest)


def known_pair(name: str) -> tuple[KnownDraft, str] | None:
    """A draft and its target, where a repository id is that of one of both; a target's first draft of known facts."""
    if (draft := next((known for known in catalog().drafts if known.draft == name), None)) is not None:
        return draft, draft.target
    found = next((known for known in drafts_for(name) if known.facts is not None), None)
    return None if found is None else (found, name)


def known_deployments(name: str) -> list[str]:
    """Shipped deployments of a draft or target by repository id."""
    pair = known_pair(name)
    return [] if pair is None else [file.removesuffix(".yaml") for file in pair[0].deployments]


def next_commands(name: str) -> str | None:
    """Hint for a repository id where an engine is expected; None where it is not in the catalogue."""
    if (pair := known_pair(name)) is None:
        return None
    commands = [f"here: dflash-trt build {pair[0].draft} --target {pair[1]} -o engine"]
    if deployments := known_deployments(name):
        own = own_gpu()
        fitting = [each for each in deployments if own is not None and f".{own.name}x" in each]
        chosen = f"{fitting[0]} --runtime vllm -o FILE" if fitting else f"--list {name}"
        commands.append(f"on a GPU machine: dflash-trt serve-config {chosen}")
    return "; ".join(commands)


def entry(draft: KnownDraft) -> dict[str, object]:
    """One draft for JSON: facts, memory, and the facts of its family."""
    family = catalog().families[draft.family]
    return {
        **msgspec.structs.asdict(draft),
        "spec": draft.facts,
        "kind": draft.kind_name,
        "weight_bytes": draft.weight_bytes(),
        **msgspec.structs.asdict(family),
    }


COLUMNS = ("draft", "target", "layers", "H", "heads", "S", "taps", "BF16", "FP8", "NVFP4")


def row(draft: KnownDraft) -> tuple[str, ...]:
    """One draft as a table row; "?" is not known."""
    facts, sizes = draft.facts, draft.weight_bytes()
    if facts is None or sizes is None:
        return (draft.draft, draft.target, *["?"] * (len(COLUMNS) - 2))
    heads = f"{facts.num_attention_heads}-{facts.num_key_value_heads} ({facts.head_dim})"
    taps = ", ".join(map(str, facts.target_layer_ids))
    numbers = (facts.num_layers, facts.hidden_size, heads, facts.block_size, taps)
    return (draft.draft, draft.target, *map(str, numbers), *(f"{size / 1e9:.2f} GB" for size in sizes.values()))


def legend() -> str:
    """Lines under a table of drafts: its columns, and what each kind adds and gains."""
    kinds = catalog().kinds
    lines = [f"Kinds, measured by others, {kinds.setting}:"]
    for kind, gain in kinds.gains.items():
        lines.append(f"  {kind}: {gain.speedup:.2f} x, acceptance length {gain.tau:.2f}; {gain.proposes}")
    lines.append("S: block size; GB: weights with layers in BF16, FP8 and NVFP4; for: chat mode it was trained for")
    return "\n".join([*lines, "licence: only one that forbids commercial use; read: when the facts were; ?: not known"])


CHOICE = ("draft", "kind", "S", "GB", "for", "published", "served by", "licence", "read")


def choice(draft: KnownDraft) -> tuple[str, ...]:
    """One draft of a target as a table row, to choose by: GB of weights in BF16, FP8 and NVFP4; "?" is not known."""
    facts, sizes = draft.facts, draft.weight_bytes()
    runtimes = catalog().families[draft.family].runtimes
    served = [name for name, answer in runtimes.items() if answer.startswith(("yes", "anchor-first"))]
    best = max(draft.speedups, key=lambda speedup: speedup.ratio, default=None)
    published = [f"tau {draft.tau}"] if draft.tau else []
    published += [f"{best.ratio} x ({best.setting})"] if best is not None else []
    return (
        draft.draft,
        draft.kind_name,
        "?" if facts is None else str(facts.block_size),
        "?" if sizes is None else "/".join(f"{size / 1e9:.2f}" for size in sizes.values()),
        draft.mode or "?",
        "; ".join(published) or "?",
        ", ".join(served) or "?",
        draft.licence or "?",
        draft.read,
    )
