# SPDX-License-Identifier: Apache-2.0
"""The directory of a report: pages, pictures, and NVIDIA's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_trt.files.picture import save_picture
from dflash_trt.files.write import OutputKind, new_directory
from dflash_trt.observe.bench.comparison_report import Report
from dflash_trt.observe.bench.curve_pictures import figure, picture
from dflash_trt.observe.bench.renderings import markdown, page
from dflash_trt.observe.bench.report_blocks import report_blocks, title
from dflash_trt.observe.bench.specdec_files import write_specdec_files
from dflash_trt.observe.bench.workloads import LoadedRun
from dflash_trt.observe.plots.page_parts import PAGE

MARKDOWN, HTML, SPECDEC = "report.md", "report.html", "specdec_bench"


def _is_ours(directory: Path) -> bool:
    file = directory / HTML
    return file.is_file() and PAGE.recognizes(file)


REPORT = OutputKind(name="a report of a bench run", recognizes=_is_ours)


def write_report(directory: Path, report: Report, runs: Sequence[LoadedRun], *, force: bool) -> None:
    """Writes all of it; raises BuildError where something stands there, unless it is a report and `force`."""
    blocks = tuple(report_blocks(report))
    with new_directory(directory, REPORT, force=force) as new:
        (new / MARKDOWN).write_text(markdown(blocks), encoding="utf-8")
        (new / HTML).write_text(page(title(report), blocks), encoding="utf-8")
        for index in range(len(report.workloads)):
            drawn = picture(report, index)
            if drawn is not None:
                (new / drawn.file).write_text(drawn.svg + "\n", encoding="utf-8")
                save_picture(figure(report, index, title(report)), new / Path(drawn.file).with_suffix(".png"))
        write_specdec_files(new / SPECDEC, runs)
