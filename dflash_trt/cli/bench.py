# SPDX-License-Identifier: Apache-2.0
"""Measures running servers under load, and reports on them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from dflash_trt.api.runtime_options import DTYPES
from dflash_trt.cli.completion import TARGET
from dflash_trt.cli.config_file import config_option
from dflash_trt.cli.options import MAX_SECONDS, PATH, FiniteRange, json_option, options, refuse_given
from dflash_trt.cli.output import print_json, print_tables, resumable
from dflash_trt.errors import shown
from dflash_trt.files.command import quoted
from dflash_trt.files.write import check_replaceable

NUMBER = re.compile("[0-9]{1,5}")
METRICS = "time_to_first_token|inter_token_latency|request_latency|output_token_throughput_per_user"
LIMIT = re.compile(rf"({METRICS}):(?!0*\.?0*$)[0-9]{{1,9}}(\.[0-9]{{1,9}})?")
"""A limit of AIPerf's --goodput: above 0, in ms or tokens/s."""


class Concurrencies(click.ParamType):  # type: ignore[type-arg]  # generic as of click 8.4
    """1,2,4."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Concurrencies, each once, in the given order."""
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(NUMBER.fullmatch(word) and 0 < int(word) <= 65536 for word in words):
            self.fail(f"expected numbers of requests as in 1,2,4, found {shown(value)}", param, ctx)
        return tuple(dict.fromkeys(map(int, words)))


class Goodput(click.ParamType):  # type: ignore[type-arg]
    """METRIC:LIMIT ..., each metric once."""

    name = "'METRIC:LIMIT ...'"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, which AIPerf takes as it is."""
        words = str(value).split()
        names = [word.partition(":")[0] for word in words]
        if not words or len(set(names)) < len(names) or not all(map(LIMIT.fullmatch, words)):
            self.fail(f"limits must look like 'time_to_first_token:500 inter_token_latency:20', not {shown(value)}",
                      param, ctx)  # fmt: skip
        return " ".join(words)


class KeyValue(click.ParamType):  # type: ignore[type-arg]
    """KEY=VALUE."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Key and value, neither empty."""
        if isinstance(value, tuple):
            return value
        key, _, text = str(value).partition("=")
        if not key or not text:
            self.fail(f"expected {self.name}, found {shown(value)}", param, ctx)
        return key, text


@click.group(short_help="Measure running servers, and report on them.")
def bench() -> None:
    """Measure running servers under load, with and without drafts, and report on them.

    \b
    Example:
      dflash-trt bench run --endpoint none=http://a:8000 --endpoint dflash=http://b:8000 --prompts gsm8k -o run
      dflash-trt bench report run -o report --at 550
    """


@bench.command(short_help="Sweep concurrency over a prompt set.")
@options(
    click.option("--endpoint", "endpoints", multiple=True, type=KeyValue("NAME=URL"),
                 help="A server to measure; repeatable."),
    click.option("--engine", type=PATH, help="Serve this engine here, without and with DFlash, instead of --endpoint."),
    click.option("--target", type=TARGET, help="Target of --engine. Default: what it was built for."),
    click.option("--draft-length", metavar="LENGTH", help="Draft length of --engine, as in `serve`. Default: its own."),
    click.option("--dtype", type=click.Choice(DTYPES),
                 help="Type of --engine's target, as in `serve`. Default: its own."),
    click.option("--prompts", required=True, metavar="SET",
                 help="gsm8k, math500, ..., a file, or SPEED-Bench's folder."),
    click.option("--split", metavar="NAME",
                 help="Part of a SPEED-Bench folder: qualitative (default), throughput_1k, ..., throughput_32k."),
    click.option("--category", "categories", metavar="NAME", multiple=True,
                 help="Only prompts of this category; repeatable."),
    click.option("--pooled", is_flag=True, help="One point for all categories, not one for each."),
    click.option("--num-prompts", type=click.IntRange(min=1),
                 help="Prompts of each category; they repeat if there are fewer."),
    click.option("--concurrency", type=Concurrencies(), default="1", show_default=True, help="Requests at once."),
    click.option("--request-rate", type=FiniteRange(0, 1e6, min_open=True),
                 help="Open loop: start this many requests per second; --concurrency caps how many run at once."),
    click.option("--arrival-pattern", type=click.Choice(["poisson", "constant"]), default="poisson", show_default=True,
                 help="Gaps between requests of --request-rate."),
    click.option("--fixed-schedule", is_flag=True, help="Replay a trace: start each prompt at its timestamp, in ms."),
    click.option("--goodput", type=Goodput(),
                 help="Count requests that meet these limits, as AIPerf's option of that name: time_to_first_token, "
                      "inter_token_latency, request_latency in ms, output_token_throughput_per_user."),
    click.option("--template", type=click.Choice(["chat", "completions"]), default="chat", show_default=True,
                 help="The API that is asked: with the target's chat template, or with plain text."),
    click.option("--thinking", type=click.Choice(["on", "off"]), help="enable_thinking of the chat template."),
    click.option("--temperature", type=FiniteRange(0, 1e6), default=0.0, show_default=True,
                 help="0 is greedy decoding."),
    click.option("--max-tokens", type=click.IntRange(1, 2**31 - 1), default=4096, show_default=True,
                 help="Longest answer, in tokens."),
    click.option("--ignore-eos", is_flag=True, help="Answers of exactly --max-tokens tokens."),
    click.option("--extra", multiple=True, type=KeyValue("FIELD=VALUE"),
                 help="Add to each request: reasoning_effort=low, top_p=0.95."),
    click.option("--set", "overrides", multiple=True, type=KeyValue("NAME.FIELD=VALUE"),
                 help="Override a setting for one method."),
    click.option("--model", metavar="NAME", help="Model to ask for, if a server has several."),
    click.option("--api-key-file", type=PATH, help="File with the servers' key on its first line."),
    click.option("--request-timeout", type=FiniteRange(0, MAX_SECONDS, min_open=True), default=600.0, show_default=True,
                 help="Seconds until a request has failed."),
    click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True,
                 help="Fixes the arrivals and the order of prompts."),
    click.option("--hardware", metavar="TEXT", help="The servers' hardware, for reports: '8x B300'."),
    click.option("--num-gpus", type=click.IntRange(min=1), help="GPUs of each server, for throughput per GPU."),
    click.option("--aiperf", type=PATH, help="AIPerf's program. Default: aiperf on PATH."),
    click.option("-o", "--output", required=True, type=PATH, help="Run to write or resume."),
    click.option("--dry-run", is_flag=True, help="Show what would be measured; send no prompt and write nothing."),
    config_option,
    json_option,
)  # fmt: skip
def run(output: Path, dry_run: bool, as_json: bool, aiperf: Path | None, **settings: Any) -> None:
    """Measure each method at each concurrency, with AIPerf for the load and the servers' own counts of drafts.

    Finished points are kept: repeat the command to resume a stopped run.

    \b
    Example:
      dflash-trt bench run --endpoint none=http://a:8000 --endpoint dflash=http://b:8000 \\
        --prompts gsm8k --concurrency 1,2,4,8 --hardware "8x B300" --num-gpus 8 -o run
    """
    _check_servers(settings)
    from dflash_trt.cli.bench_tables import measure, print_experiment, print_points
    from dflash_trt.observe.bench.experiment import design
    from dflash_trt.observe.bench.load.aiperf_run import find_aiperf
    from dflash_trt.observe.bench.prompts.data_sets import HUB_SETS
    from dflash_trt.observe.bench.run_directory import sole_measurer
    from dflash_trt.observe.bench.sweep import Sweep

    if settings["prompts"] in HUB_SETS and not dry_run:
        find_aiperf(aiperf)  # before anything is downloaded
    experiment = design(**settings)
    if dry_run:
        print_experiment(experiment.run, as_json=as_json)
        return
    with sole_measurer(output), resumable(output):
        sweep = Sweep.begin(experiment, output, find_aiperf(aiperf), _command())
        for warning in sweep.run.warnings:
            click.echo(f"warning: {warning}", err=True)
        measure(sweep)
    print_points(output, as_json=as_json)
    click.echo(f"its curve and tables: dflash-trt bench report {quoted(output)} -o DIR", err=True)


def _check_servers(settings: dict[str, Any]) -> None:
    """Checks that either running servers or an engine to serve here are given."""
    if settings["engine"] is not None:
        if settings["endpoints"]:
            raise click.UsageError("--engine: expected no --endpoint")
    elif any(settings[name] is not None for name in ("target", "draft_length", "dtype")):
        raise click.UsageError("--target, --draft-length and --dtype belong to --engine")
    elif not settings["endpoints"]:
        raise click.UsageError("expected --endpoint NAME=URL or --engine")
    if settings["fixed_schedule"]:
        refuse_given(("request_rate",), "has no use with --fixed-schedule, whose timestamps say when requests begin")
    if settings["request_rate"] is None:
        refuse_given(("arrival_pattern",), "is for --request-rate")


def _command() -> tuple[str, ...]:
    return ("dflash-trt", *sys.argv[1:]) if sys.argv[1:2] == ["bench"] else ("dflash-trt", "bench", "run", os.curdir)


@bench.command(short_help="Write curve, tables and page of one run or several.")
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN...")
@click.option("-o", "--output", type=PATH, required=True, help="Directory of the report.")
@click.option("--force", is_flag=True, help="Replace an older report there.")
@click.option(
    "--at", "user_rates", type=FiniteRange(min=0, min_open=True), multiple=True,
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
