# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt bench`: `run` measures servers, `report` compares what was measured."""

from __future__ import annotations

import click

from dflash_trt.cli.bench_report import report
from dflash_trt.cli.bench_run import run


@click.group(short_help="Measure running servers, and report on them.")
def bench() -> None:
    """Measure running servers under load, with and without drafts, and report on them.

    \b
    Example:
      dflash-trt bench run --endpoint none=http://a:8000 --endpoint dflash=http://b:8000 --prompts gsm8k -o run
      dflash-trt bench report run -o report --at 550
    """


bench.add_command(run)
bench.add_command(report)
