# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.catalog_page docs/checkpoints.md` writes the page of the catalogue (`make catalog`)."""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_trt.deploy.catalog import COLUMNS, catalog, row


def page() -> str:
    """docs/checkpoints.md."""
    found = catalog()
    lines = [
        "# Known draft checkpoints", "",
        "<!-- Written by `make catalog` from dflash_trt/deploy/data/catalog.json and checkpoints.json. -->", "",
        "The same as `dflash-trt inspect --catalog`. Facts were " + found.source + ".", "",
        "H is hidden_size, heads are query-KV (head_dim), S the block size, taps the target's layers. Memory has fc,",
        "and DFlash2's convolutions and codebooks, in BF16 always. ? is not known. Embedding and lm_head are the",
        "target's, but for Nemotron's embedding.", "",
        *_markdown(COLUMNS, [row(known) for known in found.drafts]), "",
        "## Deployment files, and published speed-ups", "",
        "Ratios against decoding without a draft, as published, each in its own setting; none was measured here.", "",
    ]  # fmt: skip
    for known in found.drafts:
        lines.append(f"- **{known.draft}**" + (f" (facts: {known.source})" if known.source else ""))
        lines += [f"  - licence {known.licence}: no commercial use"] if known.licence else []
        lines += [f"  - `build_configs/{name}`" for name in known.deployments]
        lines += [f"  - {speedup.ratio} x: {speedup.setting} ({speedup.source})" for speedup in known.speedups]
    lines += ["", "## Who serves them, and what was verified here", ""]
    for name, family in found.families.items():
        members = ", ".join(known.draft for known in found.drafts if known.family == name)
        lines += [f"### {name}: {members}", "", f"- dialect: {family.dialect or 'not read'}"]
        lines += [f"- {runtime}: {answer}" for runtime, answer in family.runtimes.items()]
        lines += [f"- verified here, on a CPU: {family.verified}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (columns, ("---",) * len(columns), *rows)]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
