# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt bench report`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.cli.options import PATH, json_option
from dflash_trt.cli.output import print_json, print_tables
from dflash_trt.files.command import quoted
from dflash_trt.files.write import check_replaceable


@click.command(short_help="Write curve, tables and page of one run or several.")
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
@click.option("--reference", metavar="NAME", default="none", show_default=True,
              help="Method that the others are compared with.")  # fmt: skip
@click.option("--beside", type=click.Choice(["paper", "nvidia"]),
              help="Also show the rows that DFlash's paper, or NVIDIA's article, published.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), help="Seed of the intervals. Default: the first run's.")
@json_option
def report(
    runs: tuple[Path, ...], output: Path, force: bool, user_rates: tuple[float, ...], concurrency: int | None,
    reference: str, beside: str | None, seed: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Write report.md, report.html, and the curve as SVG and PNG, from what `dflash-trt bench run` measured.

    Runs on the same prompts share a curve; runs on others add rows to the table of data sets. The method
    named `none` decodes without speculation: speed-ups are relative to it, or to another with --reference.

    \b
    Example:
      dflash-trt bench report results/ -o report --at 550
      dflash-trt bench report gsm8k/ math500/ humaneval/ -o report
      dflash-trt bench report run -o report --reference eagle3
      dflash-trt bench report math500/ -o report --beside paper
    """
    if beside is not None and reference != "none":
        raise click.UsageError("--beside: published speed-ups are relative to decoding without speculation")
    import jinja2  # noqa: F401 - a missing package fails before the work, not after it
    import matplotlib  # noqa: F401

    from dflash_trt.observe.bench.report.bench_report import document
    from dflash_trt.observe.bench.report.bench_report import report as report_on
    from dflash_trt.observe.bench.report.beside import beside_table
    from dflash_trt.observe.bench.report.published_rows import published_sets
    from dflash_trt.observe.bench.report.report_tables import goodput_table, speed_table, sweep_table, task_table
    from dflash_trt.observe.bench.report.run_verdict import verdict
    from dflash_trt.observe.bench.report.workloads import load_runs
    from dflash_trt.observe.bench.report.write_report import HTML, REPORT, write_report

    check_replaceable(output, REPORT, force=force)
    loaded = load_runs(runs)
    result = report_on(
        loaded, loaded[0].run.seed if seed is None else seed, user_rates, concurrency, reference=reference,
        published=None if beside is None else published_sets()[beside],
    )  # fmt: skip
    write_report(output, result, force=force)
    if as_json:
        print_json("bench-report", document(result))
        return
    for line in verdict(result):
        click.echo(line)
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    for work in result.workloads:
        goodputs = [goodput_table(work.workload)] if work.workload.goodput else []
        print_tables([speed_table(work), sweep_table(work), *goodputs])
    print_tables(task_table(result, task) for task in result.tasks)
    if result.published is not None:
        print_tables([beside_table(result.beside, result.published)])
        click.echo(f"note: {result.published.note}", err=True)
    click.echo(f"{quoted(output / HTML)} written")
