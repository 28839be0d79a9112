# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.catalog_page docs/checkpoints.md` writes the catalogue on that page (`make catalog`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.deploy.catalog import COLUMNS, Catalog, KnownDraft, catalog, row

if TYPE_CHECKING:
    from collections.abc import Iterable

UNKNOWN = "not known"
MARK = "<!-- Written by `make catalog` from dflash_trt/deploy/data/catalog.json and checkpoints.json. -->\n"


def replace_catalogue(text: str) -> str:
    """`text` with the present catalogue in the place of all that follows the mark."""
    head, mark, _ = text.partition(MARK)
    assert mark
    return head + mark + catalogue()


def catalogue() -> str:
    """The part of docs/checkpoints.md that is data."""
    page = catalog()
    known = [draft for draft in page.drafts if draft.weight_bytes() is not None]
    unknown = [draft for draft in page.drafts if draft not in known]
    lines = [
        "", "## Known checkpoints", "",
        "Facts were " + page.source + ".",
        "`dflash-trt drafts` prints them all, `drafts TARGET` those of a target; `--json` adds where each fact is",
        "from, and whether config.json itself was read. S is the block size. GB are the weights in BF16, FP8 and",
        "NVFP4; fc and DFlash2's convolutions and codebooks count as BF16. Only Nemotron's drafts have their own",
        "embedding.", "",
        *_markdown(("draft", "target", "S", "GB"), [_facts(draft) for draft in known]), "",
        "Sizes and taps of these are not known, as their config.json was not read:", "",
        *_by_owner(unknown), "",
        "## Published speed-ups", "",
        "Speed-ups are over plain decoding, as published, each in its own setting. None was measured here.", "",
        *_markdown(("draft", "speed-up", "source"), _speedups(page)), "",
        "## Runtimes", "",
        "Which runtimes load the drafts of a family; a runtime that is not named is not known.", "",
    ]  # fmt: skip
    for name, family in page.families.items():
        runtimes = {runtime: answer for runtime, answer in family.runtimes.items() if answer != UNKNOWN}
        members = ", ".join(_name(draft) for draft in page.drafts if draft.family == name)
        plain = ", ".join(runtime for runtime, answer in runtimes.items() if answer == "yes")
        answers = [plain] if plain else []
        answers += [f"{runtime}: {answer}" for runtime, answer in runtimes.items() if answer != "yes"]
        lines += [f"* **{name}**, dialect {family.dialect or 'not read'} ({members})"]
        lines += [f"    * {answer}" for answer in answers]
    lines += ["", "## What was verified here", "", "On a CPU, by family:", ""]
    lines += _grouped((name, family.verified) for name, family in page.families.items())
    lines += ["", "These licences forbid commercial use:", ""]
    lines += _grouped((_name(draft), draft.licence) for draft in page.drafts if draft.licence)
    return "\n".join(lines).rstrip() + "\n"


def _owner(draft: KnownDraft) -> str:
    """Empty where no repository is known."""
    owner, slash, _ = draft.draft.partition("/")
    return owner if slash and " " not in owner else ""


def _name(draft: KnownDraft) -> str:
    """Without its owner, which the table of drafts has."""
    return draft.draft.removeprefix(f"{_owner(draft)}/")


def _by_owner(drafts: list[KnownDraft]) -> list[str]:
    """A line for each owner with the names of their drafts."""
    names: dict[str, list[str]] = {}
    for draft in drafts:
        names.setdefault(_owner(draft) or "no repository known", []).append(_name(draft))
    return [f"* {owner}: {', '.join(sharing)}" for owner, sharing in names.items()]


def _facts(draft: KnownDraft) -> tuple[str, ...]:
    """Columns of `drafts` to choose a draft by, the three sizes as one."""
    facts = dict(zip(COLUMNS, row(draft), strict=True))
    sizes = "/".join(facts[precision].removesuffix(" GB") for precision in ("BF16", "FP8", "NVFP4"))
    return (facts["draft"], facts["target"], facts["S"], sizes)


def _speedups(page: Catalog) -> list[tuple[str, ...]]:
    """A row for each draft and source: "the same" in a setting refers to the one before."""
    rows: dict[tuple[str, str], list[str]] = {}
    for draft in page.drafts:
        for speedup in draft.speedups:
            rows.setdefault((_name(draft), speedup.source), []).append(f"{speedup.ratio} x: {speedup.setting}")
    return [(draft, "; ".join(figures), source) for (draft, source), figures in rows.items()]


def _grouped(statements: Iterable[tuple[str, str]]) -> list[str]:
    """Names with the same statement share a line."""
    names: dict[str, list[str]] = {}
    for name, statement in statements:
        names.setdefault(statement, []).append(name)
    return [f"* {', '.join(sharing)}: {statement}" for statement, sharing in names.items()]


def _markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (columns, ("---",) * len(columns), *rows)]


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(replace_catalogue(file.read_text(encoding="utf-8")), encoding="utf-8")
