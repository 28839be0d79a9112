# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt bench`, and its `report`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from dflash_trt.cli.bench_run import run
from dflash_trt.cli.options import PATH, json_option
from dflash_trt.cli.output import print_json, print_tables
from dflash_trt.files.command import quoted
from dflash_trt.files.write import check_replaceable


@click.group(short_help="Measure running servers, and report on them.")
def bench() -> None:
    """Measure running servers under load, with and without drafts, and report on them.

    \b
    Example:
      dflash-trt bench run --endpoint none=http://a:8000 --endpoint dflash=http://b:8000 --prompts gsm8k -o run
      dflash-trt bench report run -o report --at 550
    """


@bench.command(short_help="Write curve, tables and page of one run or several.")
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN...")
@click.option("-o", "--output", type=PATH, required=True, help="Directory of the report.")
@click.option("--force", is_flag=True, help="Replace an older report there.")
@click.option(
    "--at", "user_rates", type=click.FloatRange(min=0, min_open=True), multiple=True,
    help="Tokens/s per user at which throughput is compared; may be repeated. Default: round speeds.",
)  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1),
              help="Concurrency of the table by category. Default: the lowest that every method was measured "
                   "at.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), help="Seed of the intervals. Default: the first run's.")
@json_option
def report(
    runs: tuple[Path, ...], output: Path, force: bool, user_rates: tuple[float, ...], concurrency: int | None,
    seed: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Write report.md, report.html, and the curve as SVG and PNG, from what `dflash-trt bench run` measured.

    Runs on the same prompts share a curve; runs on others add rows to the table of data sets. The method
    named `none` is plain decoding: speed-ups are relative to it.

    \b
    Example:
      dflash-trt bench report results/ -o report --at 550
      dflash-trt bench report gsm8k/ math500/ humaneval/ -o report
    """
    import jinja2  # noqa: F401 - a missing package fails before the work, not after it
    import matplotlib  # noqa: F401

    from dflash_trt.observe.bench import report_tables
    from dflash_trt.observe.bench.comparison_report import report as report_on
    from dflash_trt.observe.bench.run_directory import load_runs
    from dflash_trt.observe.bench.write_report import HTML, REPORT, write_report

    check_replaceable(output, REPORT, force=force)
    loaded = load_runs(runs)
    result = report_on(loaded, loaded[0].run.seed if seed is None else seed, user_rates, concurrency)
    write_report(output, result, force=force)
    if as_json:
        print_json("bench-report", msgspec.structs.asdict(result))
        return
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    for work in result.workloads:
        print_tables([report_tables.speed_table(work), report_tables.sweep_table(work)])
        for reason in report_tables.reasons_of(work.at_speeds):
            click.echo(reason)
    print_tables(report_tables.task_table(result, task) for task in result.tasks)
    click.echo(f"{quoted(output / HTML)} written")


bench.add_command(run)
