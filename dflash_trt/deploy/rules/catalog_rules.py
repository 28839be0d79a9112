# SPDX-License-Identifier: Apache-2.0
"""Rules that ask the catalogue of known drafts: which runtime serves a draft, by which method, on which target."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dflash_trt.checkpoint.source import REPOSITORY_ID
from dflash_trt.deploy.catalog import KnownDraft, catalog, known_draft
from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.rules.checked_config import BLOCKS, CheckedConfig, Rule, unchecked, warning
from dflash_trt.deploy.schema import PACKAGES
from dflash_trt.deploy.trained_target import is_copy, trained_target

SERVED = ("yes", "anchor-first")
"""Beginnings of the catalogue's answers for a runtime that serves the drafts of a family."""
NAMED_METHOD = re.compile(r"\(method (\w+)")
UNKNOWN = "not known"


def catalogued(config: CheckedConfig) -> Iterator[Finding]:
    """A draft of the catalogue, on a runtime, with a method or for a target of which it knows better."""
    key = config.keys.draft
    names = (config.setting(key), config.served.checkpoint)
    known = next((entry for name in names if isinstance(name, str) and (entry := known_draft(name))), None)
    if known is not None and config.method is not None and config.served.mode == "native":
        yield from _runtime(config, known, key)


def trained_pair(config: CheckedConfig) -> Iterator[Finding]:
    """A draft whose file or the catalogue names another target than the one that is served."""
    key, target, draft = config.keys.draft, config.served.target, config.served.draft_sizes
    name = config.served.checkpoint or config.setting(key)
    if (
        target is None
        or not REPOSITORY_ID.fullmatch(target)
        or not isinstance(name, str)
        or config.method not in BLOCKS
    ):
        return
    facts = None if draft is None or draft.checkpoint is None else draft.checkpoint.config
    trained = trained_target(name, facts)
    if trained is not None and not is_copy(str(target), trained.name):
        yield warning(
            "trained-pair", key, f"a draft that was trained for {target}",
            f"{name}, trained for {trained.name} ({trained.source}): what it accepts on another target is not known",
            f"look for one: dflash-trt drafts {target}",
        )  # fmt: skip


def _runtime(config: CheckedConfig, known: KnownDraft, key: str) -> Iterator[Finding]:
    runtime, chosen = config.runtime, config.method
    answer = catalog().families[known.family].runtimes.get(runtime, UNKNOWN)
    wanted = NAMED_METHOD.search(answer)
    package = PACKAGES[runtime]
    if wanted is not None and chosen in BLOCKS and chosen != wanted[1]:
        yield warning(
            "catalogue", config.keys.method, f"{wanted[1]} for {known.draft}", f"{chosen}; catalogue: {answer}",
            f"write {wanted[1]}",
        )  # fmt: skip
    elif answer == UNKNOWN:
        yield unchecked(
            "catalogue", key, f"whether {package} serves {known.draft}, of which nothing is known",
            "look at the acceptance length of the first run",
        )  # fmt: skip
    elif not answer.startswith(SERVED):
        yield warning(
            "catalogue", key, f"a draft that {package} is known to serve", f"{known.draft}; catalogue: {answer}",
            "look at the acceptance length of the first run, or choose another runtime",
        )  # fmt: skip


def draft_method(config: CheckedConfig) -> Iterator[Finding]:
    """The method that the draft's blocks need: DSpark where they are anchor-first or have a Markov head."""
    draft, chosen = config.served.draft_sizes, config.method
    if draft is None or chosen is None or config.served.mode == "engine":
        return
    wanted = "dspark" if draft.spec.is_dspark else "dflash"
    is_left_out = config.setting(config.keys.method) is None
    if wanted == chosen or (not is_left_out and (chosen not in BLOCKS or known_draft(draft.name) is not None)):
        return
    found = f"none, from which vLLM makes {chosen} by the draft's path or architecture" if is_left_out else chosen
    yield warning(
        "draft-method", config.keys.method, f"{wanted} for {draft.name}, a draft of kind {draft.spec.kind}", found,
        f"write {wanted}",
    )  # fmt: skip


CATALOG_RULES: tuple[Rule, ...] = (catalogued, trained_pair, draft_method)
"""Rules about what is known of a draft."""
