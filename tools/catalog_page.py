# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.catalog_page docs/checkpoints.md` writes the catalogue on that page (`make catalog`)."""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_trt.deploy.catalog import COLUMNS, catalog, row

UNKNOWN = "not known"
MARK = "<!-- Written by `make catalog` from dflash_trt/deploy/data/catalog.json and checkpoints.json. -->\n"


def replace_catalogue(text: str) -> str:
    """`text` with the present catalogue in the place of all that follows the mark."""
    head, mark, _ = text.partition(MARK)
    assert mark
    return head + mark + catalogue()


def catalogue() -> str:
    """The part of docs/checkpoints.md that is data."""
    found = catalog()
    lines = [
        "", "## Known checkpoints", "",
        "`dflash-trt inspect --catalog` prints this table, and `serve-config --list` the deployments. Facts were",
        found.source + ".", "",
        "H is hidden_size, heads are query-KV (head_dim), S is the block size, taps are target layers, ? is unknown.",
        "fc and DFlash2's convolutions and codebooks count as BF16 in every column. Only Nemotron's drafts have an",
        "embedding of their own.", "",
        *_markdown(COLUMNS, [row(known) for known in found.drafts]), "",
        "## Sources and published speed-ups", "",
        "Speed-ups are over plain decoding, as published, each in its own setting. None was measured here.", "",
    ]  # fmt: skip
    for known in (draft for draft in found.drafts if draft.source or draft.licence or draft.speedups):
        lines.append(f"- **{known.draft}**" + (f" (facts: {known.source})" if known.source else ""))
        lines += [f"  - licence {known.licence}: no commercial use"] if known.licence else []
        lines += [f"  - {speedup.ratio} x: {speedup.setting} ({speedup.source})" for speedup in known.speedups]
    lines += ["", "## Runtimes, and what was verified here", ""]
    for name, family in found.families.items():
        members = ", ".join(known.draft for known in found.drafts if known.family == name)
        lines += [f"### {name}: {members}", "", f"- dialect: {family.dialect or 'not read'}"]
        lines += [f"- {runtime}: {answer}" for runtime, answer in family.runtimes.items() if answer != UNKNOWN]
        unknown = [runtime for runtime, answer in family.runtimes.items() if answer == UNKNOWN]
        lines += [f"- {UNKNOWN}: {', '.join(unknown)}"] if unknown else []
        lines += [f"- verified here, on a CPU: {family.verified}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (columns, ("---",) * len(columns), *rows)]


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(replace_catalogue(file.read_text(encoding="utf-8")), encoding="utf-8")
