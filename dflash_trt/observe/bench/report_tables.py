# SPDX-License-Identifier: Apache-2.0
"""Runs, points and reports as tables and pictures, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from dflash_trt.files.command import command_line
from dflash_trt.observe.bench.comparison_report import (
    BenchReport,
    ComparisonRow,
    MethodFigures,
    TaskReport,
    WorkloadReport,
)
from dflash_trt.observe.bench.goodput import Objectives, in_words
from dflash_trt.observe.bench.records import BenchPoint, BenchRun, Distribution
from dflash_trt.observe.bench.run_directory import reference_title
from dflash_trt.observe.bench.speed_curve import AtSpeed, MeasuredSpeedup, SpeedCurve
from dflash_trt.observe.pages.page_templates import Table
from dflash_trt.observe.plots.curves import TITLES, Plot, PlotCurve, PlotPoint, styles

IF_ANY = ("lost", "cut")
"""Columns that are left out if all their cells are 0."""
NONE = "-"
TAU = "tau of drafting passes"


def title_of(method: str) -> str:
    """In tables."""
    return TITLES.get(method, method)


def title(report: BenchReport) -> str:
    models = dict.fromkeys(method.model for facts in report.runs for method in facts.run.methods)
    servers = dict.fromkeys(facts.run.server or "hardware not stated" for facts in report.runs)
    return f"{', '.join(models)} on {', '.join(servers)}: measured"


def workload_plot(report: BenchReport, work: WorkloadReport) -> Plot:
    style_of = dict(zip(report.methods, styles(report.methods), strict=True))
    curves = [
        PlotCurve(curve.title, style_of[curve.name], tuple(
            PlotPoint(user_rate=p.user_rate, gpu_rate=p.gpu_rate, label=str(p.concurrency), is_best=p in curve.front)
            for p in curve.points
        ))
        for curve in work.curves if curve.points
    ]  # fmt: skip
    return Plot(title=work.title, detail=title(report), per=work.per, labels="concurrency", curves=tuple(curves))


def speed_table(work: WorkloadReport) -> Table:
    """Throughput where each user gets a speed, between measured points."""
    compared = [curve.name for curve in work.curves if curve.name != work.reference]
    columns = ("tokens/s/user", *(curve.title for curve in work.curves))
    rows = [
        (f"{at.user_rate:,g}", *(_reached(curve, at) for curve in work.curves),
         *(factor_text(at.factors[name]) for name in compared))
        for at in work.at_speeds
    ]  # fmt: skip
    return Table(
        title=f"Tokens/s per {work.per} at equal speed of a user: {work.title}",
        columns=columns + tuple(f"{work.titles[name]} / {title_of(work.reference)}" for name in compared),
        rows=tuple(rows), num_text_columns=0,
    )  # fmt: skip


def reasons_of(at_speeds: Sequence[AtSpeed]) -> tuple[str, ...]:
    """Why a factor is missing, with the speeds that it is missing at."""
    rates: dict[str, list[str]] = {}
    for at in at_speeds:
        for factor in at.factors.values():
            if factor.why is not None:
                rates.setdefault(factor.why, []).append(f"{at.user_rate:,g}")
    return tuple(f"{', '.join(dict.fromkeys(at))}: {why}" for why, at in rates.items())


def sweep_table(work: WorkloadReport) -> Table:
    columns = ("concurrency", "method", f"tokens/s/{work.per}", "tokens/s/user", f"x {title_of(work.reference)}", TAU)
    has_lost = any(measured.lost for line in work.sweep for measured in line.by_method.values())
    rows = []
    for line in work.sweep:
        for name, measured in line.by_method.items():
            rates = (_rate(measured.rate), _rate(measured.user_rate))
            factor = "" if name == work.reference else factor_text(measured.speedup)
            lost = (str(measured.lost),) if has_lost else ()
            rows.append((line.name, work.titles[name], *rates, factor, _tau(measured.tau_of_drafting_passes), *lost))
    return Table(
        title=f"At equal concurrency: {work.title}", rows=tuple(rows), num_text_columns=2,
        columns=columns + (("lost",) if has_lost else ()),
    )  # fmt: skip


def drafts_table(work: WorkloadReport) -> Table:
    """Counts of drafts; a column says where they are from unless all are from one source."""
    sources = dict.fromkeys(line.acceptance.source for line in work.acceptance)
    is_mixed = len(sources) > 1
    rows = []
    for line in work.acceptance:
        counts, source = line.acceptance.counts, (line.acceptance.source,) if is_mixed else ()
        numbers = (None,) * 3 if counts is None else (counts.drafting_passes, counts.proposed, counts.accepted)
        rows.append(
            (work.titles[line.method], *source, str(line.concurrency),
             *(NONE if count is None else f"{count:,}" for count in numbers),
             _tau(line.acceptance.tau_of_drafting_passes))
        )  # fmt: skip
    return Table(
        title=f"Drafts{'' if is_mixed else f' ({next(iter(sources))})'}: {work.title}", rows=tuple(rows),
        columns=("method", *(("source",) if is_mixed else ()), "concurrency", "drafting passes", "proposed", "accepted",
                 TAU), num_text_columns=1 + is_mixed,
    )  # fmt: skip


def position_tables(work: WorkloadReport) -> Iterator[Table]:
    """The share of drafting passes in which the draft at position 1, 2, ... was accepted: a table for each method."""
    for method in dict.fromkeys(line.method for line in work.acceptance if line.shares):
        lines = [line for line in work.acceptance if line.method == method and line.shares]
        most = max(len(line.shares) for line in lines)
        shares = [[f"{share:.0%}" for share in line.shares] + [NONE] * (most - len(line.shares)) for line in lines]
        yield Table(
            title=f"Acceptance by position, {work.titles[method]}: {work.title}", num_text_columns=0,
            columns=("position", *(f"at {line.concurrency}" for line in lines)),
            rows=tuple((str(position), *cells) for position, cells in enumerate(zip(*shares, strict=True), 1)),
        )  # fmt: skip


def latency_tables(work: WorkloadReport) -> Iterator[Table]:
    """Percentiles: a table for each latency that was measured."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for line in work.sweep:
        for name, measured in line.by_method.items():
            for title, d in measured.latencies:
                cells = (_milliseconds(value) for value in (d.p50, d.p90, d.p99))
                found.setdefault(title, []).append((line.name, work.titles[name], *cells))
    for title, rows in found.items():
        columns = ("concurrency", "method", "p50", "p90", "p99")
        yield Table(title=f"{title}, ms: {work.title}", columns=columns, rows=tuple(rows), num_text_columns=2)


def goodput_table(work: WorkloadReport, objectives: Objectives) -> Table:
    """Requests that met all objectives."""
    rows = [
        (line.name, work.titles[name], f"{found.per_second:.2f}", f"{found.good / max(1, found.sent):.0%}")
        for line in work.sweep for name, measured in line.by_method.items() if (found := measured.goodput) is not None
    ]  # fmt: skip
    return Table(
        title=f"Goodput, {in_words(objectives)}: {work.title}", rows=tuple(rows), num_text_columns=2,
        columns=("concurrency", "method", "good requests/s", "share of those sent"),
    )  # fmt: skip


def over(report: BenchReport) -> str:
    """What speed-ups are relative to."""
    return reference_title(report.reference)


def task_table(report: BenchReport, task: TaskReport) -> Table:
    """Tokens/s of one request, speed-up and tau of each method."""
    compared = [name for name in report.methods if name != report.reference]
    columns: tuple[str, ...] = ("task", "concurrency", f"{title_of(report.reference)}, tokens/s")
    for name in compared:
        columns += (f"{report.titles[name]}, tokens/s", "speed-up", TAU)
    rows = []
    for row in task.rows:
        cells = [row.name, str(row.concurrency), *_task_cells(row, report.reference)[:1]]
        rows.append((*cells, *(cell for name in compared for cell in _task_cells(row, name))))
    if (mean := task.average) is not None:
        name = "average" if mean.num_rows == len(task.rows) else f"average of {mean.num_rows}"
        cells = [name, "", ""]
        for method in compared:
            cells += ["", f"{mean.speedups[method]:.2f}x", _tau(mean.taus_of_drafting_passes.get(method))]
        rows.append(tuple(cells))
    return Table(title=f"Tokens/s of one request: {task.title}", columns=columns, rows=tuple(rows))


def _task_cells(row: ComparisonRow, method: str) -> tuple[str, str, str]:
    measured = row.by_method.get(method)
    if measured is None:
        return NONE, NONE, NONE
    return _rate(measured.rate), factor_text(measured.speedup), _tau(measured.tau_of_drafting_passes)


def run_facts(run: BenchRun) -> Iterator[str]:
    """Hardware, versions, command and seed, in words."""
    client, prompts, request = run.client, run.prompt_set, run.request
    gpus = ", ".join(client.gpus) or "no GPU"
    thinking = f"thinking {request.thinking}, " if request.thinking else ""
    ended = "eos ignored" if request.ignore_eos else "natural end"
    yield f"created: {run.created}"
    yield f"server: {run.server or 'not stated'}"
    yield f"GPUs of a server: {run.num_gpus or 'not stated, so throughput is per server'}"
    yield f"load sent from: {client.cpu}, {client.cores} cores, {client.memory_gib:.0f} GiB, {gpus}"
    yield f"prompts: {prompts.name}: {prompts.num_prompts} from {prompts.source}, sha256 {prompts.sha256[:12]}"
    yield (
        f"requests: {request.template}, {thinking}temperature {request.temperature:g}, up to {request.max_tokens}"
        f" tokens, {ended}"
    )
    yield f"load: {load_text(run)}"
    for m in run.methods:
        overrides = f", with {m.overrides}" if m.overrides else ""
        yield f"{m.name}: {m.model} at {m.url}, {m.runtime} {m.runtime_version or '(version unknown)'}{overrides}"
    yield f"versions: {', '.join(f'{name} {version}' for name, version in run.versions.items())}"
    yield f"command: {command_line(run.command)}"
    yield f"seed: {run.seed}"


def load_text(run: BenchRun) -> str:
    """Closed or open loop, in words."""
    if run.arrivals is None:
        return "closed loop: the next request begins when one ends"
    pattern, rate = run.arrivals.arrival_pattern, run.arrivals.request_rate
    if rate is None:
        return "open loop: each prompt begins at its timestamp"
    return f"open loop: {rate:g} requests/s, {pattern}, at most as many at once as the concurrency"


def factor_text(factor: MeasuredSpeedup | None) -> str:
    """3.1x (2.9-3.3), or a dash."""
    if factor is None or factor.value is None:
        return NONE
    spread = "" if factor.interval is None else f" ({factor.interval[0]:.2f}-{factor.interval[1]:.2f})"
    return f"{factor.value:.2f}x{spread}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def _reached(curve: SpeedCurve, at: AtSpeed) -> str:
    rate = at.gpu_rates[curve.name]
    if rate is None:
        return "not measured" if curve.front and at.user_rate < curve.front[-1].user_rate else "not reached"
    return _rate(rate)


def _rate(rate: float | None) -> str:
    return NONE if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}"


def _tau(tau: float | None) -> str:
    return NONE if tau is None else f"{tau:.2f}"


def experiment_tables(run: BenchRun) -> Iterator[Table]:
    """A table for each method, and one of the prompts and what is asked."""
    for method in run.methods:
        fields = msgspec.to_builtins(method)
        facts = tuple((key, _text(value)) for key, value in fields.items() if value not in (None, {}))
        yield Table(title=method.name, columns=("method", "value"), rows=facts)
    rows = (
        ("prompts", f"{run.prompt_set.num_prompts} of {run.prompt_set.name}"),
        ("categories", ", ".join(run.prompt_set.categories) or "-"),
        ("concurrency", ", ".join(map(str, run.concurrencies))),
        ("load", load_text(run)),
        ("points", str(len(run.methods) * max(1, len(run.prompt_set.categories)) * len(run.concurrencies))),
        *((f"request {key}", _text(value)) for key, value in msgspec.to_builtins(run.request).items()),
        *(("warning", warning) for warning in run.warnings),
    )
    yield Table(title="Experiment", columns=("setting", "value"), rows=rows)


def point_tables(run: BenchRun, points: Sequence[BenchPoint]) -> Iterator[Table]:
    """A table of each category."""
    for category in dict.fromkeys(point.category for point in points):
        of = "" if category is None else f", {category}"
        rows = [_row(point) for point in points if point.category == category]
        columns = tuple(name for name in rows[0] if name not in IF_ANY or any(row[name] != "0" for row in rows))
        yield Table(
            title=f"{run.prompt_set.name}{of}: {_settings(run.request)}",
            columns=columns,
            rows=tuple(tuple(row[name] for name in columns) for row in rows),
        )


def _row(point: BenchPoint) -> dict[str, str]:
    requests, tau = point.requests, point.acceptance.tau_of_drafting_passes
    return {
        "method": point.method,
        "at once": str(point.concurrency),
        "done": str(requests.completed),
        "lost": str(requests.failed + requests.timed_out),
        "cut": str(requests.cut),
        "tokens/s": f"{point.output_tokens_per_second:.1f}",
        "tokens/s per user": _median(point.user_tokens_per_second, 1, 1),
        "TTFT, ms": _median(point.ttft_seconds, 1e3, 0),
        TAU: _tau(tau),
    }


def _median(distribution: Distribution | None, scale: float, decimals: int) -> str:
    return NONE if distribution is None else f"{distribution.p50 * scale:.{decimals}f}"


def _settings(request: msgspec.Struct) -> str:
    fields = msgspec.to_builtins(request)
    chosen = {key: value for key, value in fields.items() if value not in (None, {}) and value is not False}
    return ", ".join(f"{key} {_text(value)}" for key, value in chosen.items())


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def describe_point(point: BenchPoint) -> str:
    """One measured point in one line."""
    tau, category = point.acceptance.tau_of_drafting_passes, "" if point.category is None else f" {point.category}"
    acceptance = "" if tau is None else f", tau of drafting passes {tau:.2f}"
    requests = f"{point.requests.completed} of {point.requests.sent} requests"
    rate = f"{point.output_tokens_per_second:.1f} tokens/s"
    return f"{point.method}{category} c{point.concurrency}: {requests}, {rate}{acceptance}"


FASTER, SLOWER, UNDECIDED = "faster", "slower", "not decided"


def verdict(report: BenchReport) -> tuple[str, ...]:
    """The first lines: one for each method but the reference, over all concurrencies that both were measured at."""
    return tuple(_verdict(work, name) for work in report.workloads for name in work.titles if name != work.reference)


def _verdict(work: WorkloadReport, name: str) -> str:
    found = [(row, _speedup(row, name)) for row in work.sweep]
    measured = [(row, speedup) for row, speedup in found if speedup is not None and speedup.value is not None]
    title = f"{work.titles[name]} against {work.reference_title}, {work.title}"
    if not measured:
        return f"{title}: not compared, because no concurrency was measured with both"
    groups = [(kind, list(rows)) for kind, rows in groupby(measured, key=lambda each: judged(each[1]))]
    kinds = {kind for kind, _ in groups}
    whole = f"{kinds.pop()} everywhere" if len(kinds) == 1 and len(measured) > 1 else ""
    parts = [f"{'' if whole else f'{kind} '}{_at(rows)}" for kind, rows in groups]
    best = _goodputs(work, name)
    return f"{title}: {f'{whole}: ' if whole else ''}{'; '.join(parts)}{f'. {best}' if best else ''}"


def judged(speedup: MeasuredSpeedup) -> str:
    """Faster or slower only where the 95 % interval says so."""
    low, high = speedup.interval or (0.0, float("inf"))
    return FASTER if low > 1 else SLOWER if high < 1 else UNDECIDED


def _speedup(row: ComparisonRow, name: str) -> MeasuredSpeedup | None:
    figures = row.by_method.get(name)
    return None if figures is None else figures.speedup


def _at(rows: Sequence[tuple[ComparisonRow, MeasuredSpeedup]]) -> str:
    """at concurrency 1 to 8 (1.93x to 1.31x)."""
    names, values = [row.name for row, _ in rows], sorted(speedup.value or 0.0 for _, speedup in rows)
    if len(rows) == 1:
        return f"at concurrency {names[0]} ({values[0]:.2f}x)"
    return f"at concurrency {names[0]} to {names[-1]} ({values[0]:.2f}x to {values[-1]:.2f}x)"


def _goodputs(work: WorkloadReport, name: str) -> str:
    """The best goodput of both."""
    best = {method: _best(work.sweep, method) for method in (name, work.reference)}
    if None in best.values():
        return ""
    texts = [f"{value.goodput.per_second:.2f} requests/s at {row.name}" for row, value in best.values()]  # type: ignore[union-attr,misc]
    return f"Best goodput: {texts[0]}, {work.reference_title} {texts[1]}"


def _best(sweep: Sequence[ComparisonRow], method: str) -> tuple[ComparisonRow, MethodFigures] | None:
    found = [(row, figures) for row in sweep if (figures := row.by_method.get(method)) and figures.goodput is not None]
    return max(found, key=lambda each: each[1].goodput.per_second if each[1].goodput else 0.0, default=None)
