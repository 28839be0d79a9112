# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.catalog_page docs/checkpoints.md` writes the catalogue on that page (`make catalog`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.deploy.catalog import COLUMNS, Catalog, KnownDraft, catalog, row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
    lines = [
        "", "## Known checkpoints", "",
        "Facts were " + page.source + ".",
        "`dflash-trt drafts --json` adds sources, and how each family was verified on a CPU. In brackets:",
        "block size, GB of weights in BF16, FP8 and NVFP4, where config.json was read (fc and DFlash2's convolutions",
        "and codebooks count as BF16). Runtimes that are not named are unknown.", "",
    ]  # fmt: skip
    for name, family in page.families.items():
        members = ", ".join(_named(draft) for draft in page.drafts if draft.family == name)
        lines += [f"* **{name}** ({family.dialect or 'not read'}): {members}"]
        lines += [f"    * {runtime}" for runtime in _runtimes(family.runtimes)]
    lines += [
        "", "## Published speed-ups", "",
        "Relative to decoding without speculation, as published, each in its own setting. None was measured here.", "",
        *_markdown(("draft", "speed-up", "source"), _speedups(page)), "",
        "Licences that forbid commercial use:", "",
    ]  # fmt: skip
    lines += _grouped((_name(draft), draft.licence) for draft in page.drafts if draft.licence)
    return "\n".join(lines).rstrip() + "\n"


def _runtimes(answers: Mapping[str, str]) -> list[str]:
    """One line for all that load a family without conditions, then a line for each other; ours stand above."""
    known = {name: answer for name, answer in answers.items() if name != "dflash-trt" and answer != UNKNOWN}
    plain = ", ".join(name for name, answer in known.items() if answer == "yes")
    others = [f"{name}: {answer}" for name, answer in known.items() if answer != "yes"]
    return [f"loaded by {plain}", *others] if plain else others


def _named(draft: KnownDraft) -> str:
    """The repository, with block size and sizes of the weights where they are known."""
    if draft.weight_bytes() is None:
        return draft.draft
    facts = dict(zip(COLUMNS, row(draft), strict=True))
    sizes = "/".join(facts[precision].removesuffix(" GB") for precision in ("BF16", "FP8", "NVFP4"))
    return f"{draft.draft} ({facts['S']}; {sizes})"


def _name(draft: KnownDraft) -> str:
    """Without the owner of its repository."""
    return draft.draft.partition("/")[2] or draft.draft


def _speedups(page: Catalog) -> list[tuple[str, ...]]:
    """A row for each draft and source: "the same" in a setting refers to the one before."""
    rows: dict[tuple[str, str], list[str]] = {}
    for draft in page.drafts:
        for speedup in draft.speedups:
            rows.setdefault((_name(draft), speedup.source), []).append(f"**{speedup.ratio}x** {speedup.setting}")
    return [(draft, "; ".join(figures), _link(source)) for (draft, source), figures in rows.items()]


def _link(source: str) -> str:
    """A model card or a paper as a short link, any other source as it is written."""
    kind, _, name = source.rpartition(" ")
    match kind:
        case "card of":
            return f"[card](https://huggingface.co/{name})"
        case "arXiv":
            return f"[arXiv](https://arxiv.org/abs/{name})"
    return source


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
