# SPDX-License-Identifier: Apache-2.0
"""The page of `dflash-trt estimate --html`."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.files.write import new_file
from dflash_trt.observe.estimate import tables
from dflash_trt.observe.estimate.report import Estimate
from dflash_trt.observe.pages.page_templates import PAGE, render
from dflash_trt.observe.plots.curves import NARROW, svg


def write_page(result: Estimate, file: Path) -> None:
    """Writes the page; raises BuildError where `file` is no page of ours, or cannot be written."""
    with new_file(file, PAGE, force=True) as new:
        new.write_text(page(result), encoding="utf-8")


def page(result: Estimate) -> str:
    """The page as text; the same estimate gives the same bytes."""
    plot = tables.plot(result)
    return render(
        "estimate.j2", "html", name=result.name, title=tables.title(result), lead=tables.lead(result),
        caution=tables.caution(result),
        picture={"alt": plot.description, "wide": svg(plot), "narrow": svg(plot, NARROW)},
        tables=list(tables.tables(result)),
    )  # fmt: skip
