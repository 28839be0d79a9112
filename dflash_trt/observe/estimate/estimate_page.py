# SPDX-License-Identifier: Apache-2.0
"""The page of an estimate."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.files.write import new_file
from dflash_trt.observe.estimate.estimate_text import caution, lead, title, verdict
from dflash_trt.observe.estimate.published_beside import published_lines
from dflash_trt.observe.estimate.report import Estimate
from dflash_trt.observe.estimate.tables import plot, tables
from dflash_trt.observe.pages.page_templates import PAGE, render
from dflash_trt.observe.plots.curves import NARROW, svg


def write_page(result: Estimate, file: Path) -> None:
    """Writes the page; raises BuildError if `file` is another file, or cannot be written."""
    with new_file(file, PAGE, force=True) as new:
        new.write_text(page(result), encoding="utf-8")


def page(result: Estimate) -> str:
    """The page as text; the same estimate gives the same bytes."""
    picture = plot(result)
    return render(
        "estimate.j2", "html", name=result.name, title=title(result), verdict=verdict(result),
        lead=" ".join((lead(result), *published_lines(result.system))),
        caution=caution(result.system),
        picture={"alt": picture.description, "wide": svg(picture), "narrow": svg(picture, NARROW)},
        tables=list(tables(result)),
    )  # fmt: skip
