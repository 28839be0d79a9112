# SPDX-License-Identifier: Apache-2.0
"""A report in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dflash_trt.files.command import command_line
from dflash_trt.observe.bench.announced import AVERAGE, Figure
from dflash_trt.observe.bench.blocks import Block, Heading, Listing, Paragraph, Picture, Table
from dflash_trt.observe.bench.bootstrap import NUM_SAMPLES
from dflash_trt.observe.bench.comparison_report import (
    TAU,
    TAU_COLUMN,
    CategoryReport,
    Published,
    Report,
    WorkloadReport,
)
from dflash_trt.observe.bench.comparison_tables import Line
from dflash_trt.observe.bench.curve_pictures import picture
from dflash_trt.observe.bench.records import Run
from dflash_trt.observe.bench.speed_curve import AtSpeed, Curve, Factor
from dflash_trt.observe.bench.workloads import BASELINE
from dflash_trt.observe.plots.methods import TITLES

NONE = "-"


def title(report: Report) -> str:
    """Models and hardware."""
    models = dict.fromkeys(method.model for one in report.runs for method in one.run.methods)
    servers = dict.fromkeys(one.run.server or "hardware not told" for one in report.runs)
    return f"{', '.join(models)} on {', '.join(servers)}: measured"


def report_blocks(report: Report) -> Iterator[Block]:
    """The whole page, top to bottom."""
    yield Heading(title(report), 1)
    yield Paragraph(
        f"{TAU} Speed-ups are over plain decoding; behind them, in brackets, 95 % intervals over the prompts: completed"
        f" requests drawn again {NUM_SAMPLES} times, seed {report.seed}. They hold no spread between runs or machines."
    )
    if report.notes:
        yield Listing(report.notes)
    curves = [block for index, work in enumerate(report.workloads) for block in _workload(work, picture(report, index))]
    if len(report.workloads) == 1:
        yield from curves
    for category in report.categories:
        yield from _categories(category)
    yield from _data_sets(report)
    yield from _tasks(report)
    yield from _published(report)
    if len(report.workloads) > 1:
        yield from curves  # long: what they add up to comes first
    yield Heading("What was measured")
    for one in report.runs:
        yield Heading(one.directory, 3)
        yield Listing(tuple(f"{name}: {value}" for name, value in run_facts(one.run).items()))


def _workload(work: WorkloadReport, drawn: Picture | None) -> Iterator[Block]:
    yield Heading(f"Throughput against one user's speed: {work.title}")
    if drawn is not None:
        yield drawn
    yield Listing(work.ends)
    if work.at_speeds:
        yield Heading(f"Tokens/s per {work.per} at equal speed of a user", 3)
        yield speed_table(work)
        reasons = reasons_of(work.at_speeds)
        if reasons:
            yield Listing(reasons)
    yield Heading("At equal concurrency", 3)
    yield sweep_table(work)
    if work.acceptance:
        yield Heading("Acceptance by position", 3)
        yield Paragraph("Per verify pass, the share in which the draft at position 1, 2, ... was accepted.")
        yield _acceptance(work)


def speed_table(work: WorkloadReport) -> Table:
    """Throughput where each user gets a speed, between measured points."""
    methods = [one.name for one in work.curves]
    others = [name for name in methods if name != BASELINE]
    columns = ("tokens/s/user", *(work.titles[name] for name in methods))
    columns += tuple(f"{work.titles[name]} / plain" for name in others)
    rows = [
        (f"{at.user_rate:,g}", *(_reached(one, at) for one in work.curves),
         *(factor_text(at.factors[name]) for name in others))
        for at in work.at_speeds
    ]  # fmt: skip
    return Table(columns, tuple(rows), texts=0)


def reasons_of(at_speeds: Sequence[AtSpeed]) -> tuple[str, ...]:
    """Why a factor is missing, with the speeds that it is missing at."""
    speeds: dict[str, list[str]] = {}
    for at in at_speeds:
        for factor in at.factors.values():
            if factor.why is not None:
                speeds.setdefault(factor.why, []).append(f"{at.user_rate:,g}")
    return tuple(f"{', '.join(dict.fromkeys(at))}: {why}" for why, at in speeds.items())


def sweep_table(work: WorkloadReport) -> Table:
    """Every concurrency and method."""
    columns = ("concurrency", "method", f"tokens/s/{work.per}", "tokens/s/user", "x plain", TAU_COLUMN, "lost")
    rows = []
    for line in work.sweep:
        for name, found in line.by_method.items():
            rates = (_rate(found.rate), _rate(found.user_rate))
            factor = "" if name == BASELINE else factor_text(found.speedup)
            rows.append(
                (line.name, work.titles[name], *rates, factor, _tau(found.tau_of_drafting_passes), str(found.lost))
            )
    return Table(columns, tuple(rows), texts=2)


def _acceptance(work: WorkloadReport) -> Table:
    most = max(len(one.shares) for one in work.acceptance)
    columns: tuple[str, ...] = ("method", "source", "concurrency", "passes", "proposed", "accepted", TAU_COLUMN)
    columns += tuple(str(index) for index in range(1, most + 1))
    rows = []
    for one in work.acceptance:
        found, counts = one.acceptance, one.acceptance.counts
        cells = [NONE] * 3 if counts is None else _counts(counts.drafting_passes, counts.proposed, counts.accepted)
        shares = [f"{share:.0%}" for share in one.shares]
        head = (work.titles[one.method], found.source, str(one.concurrency))
        rows.append((*head, *cells, _tau(found.tau_of_drafting_passes), *shares, *[NONE] * (most - len(shares))))
    return Table(columns, tuple(rows), texts=2)


def _categories(found: CategoryReport) -> Iterator[Block]:
    yield Heading(f"Speed-up by category, concurrency {found.concurrency}: {found.title}")
    yield Paragraph("Of output tokens / seconds from sending a request to its last token, all requests of a category.")
    yield category_table(found)


def category_table(found: CategoryReport) -> Table:
    """The announcement's Table 1."""
    others = [name for name in found.methods if name != BASELINE]
    rows = [(line.name, *(_speedup(line, name) for name in others)) for line in found.lines]
    if found.average is not None:
        name = AVERAGE if found.average.num_rows == len(found.lines) else f"{AVERAGE} of {found.average.num_rows}"
        rows.append((name, *(f"{found.average.speedups[method]:.2f}x" for method in others)))
    return Table(("category", *(found.titles[name] for name in others)), tuple(rows))


def _data_sets(report: Report) -> Iterator[Block]:
    if not report.data_sets:
        return
    others = [name for name in report.methods if name != BASELINE]
    yield Heading("Data sets, tokens/s of one request")
    columns: tuple[str, ...] = ("data set", "concurrency", "plain")
    for name in others:
        columns += (report.titles[name], "speed-up")
    rows = []
    for line in report.data_sets:
        cells = [line.name, str(line.concurrency), _rate(_rate_of(line, BASELINE))]
        for name in others:
            cells += [_rate(_rate_of(line, name)), _speedup(line, name)]
        rows.append(tuple(cells))
    yield Table(columns, tuple(rows))


def _tasks(report: Report) -> Iterator[Block]:
    """As the paper has it: speed-up and tau, side by side."""
    others = [name for name in report.methods if name != BASELINE]
    lines = [(f"{one.title}, {line.name}", line) for one in report.categories for line in one.lines]
    lines += [(line.name, line) for line in report.data_sets]
    if not lines or not others:
        return
    yield Heading("Speed-up and tau of drafting passes by task")
    columns: tuple[str, ...] = ("task", "concurrency")
    for name in others:
        columns += (f"{report.titles[name]}, speed-up", TAU_COLUMN)
    rows = []
    for task, line in lines:
        cells = [task, str(line.concurrency)]
        for name in others:
            found = line.by_method.get(name)
            cells += [_speedup(line, name), _tau(found.tau_of_drafting_passes if found else None)]
        rows.append(tuple(cells))
    yield Table(columns, tuple(rows))


def _published(report: Report) -> Iterator[Block]:
    yield Heading("Beside what was published")
    models = ", ".join(dict.fromkeys(method.model for one in report.runs for method in one.run.methods))
    if not report.published:
        yield Paragraph(f"No figure for {models} is known here; those of other targets do not stand beside it.")
        return
    yield Paragraph(
        f"What is known for {models}. A figure stands beside this run's where target, data set, method, GPU, count of"
        " GPUs, runtime and, where it is named, concurrency are the same; draft and prompts may still differ."
    )
    rows = [_published_row(report, one) for one in report.published if not one.differences]
    if rows:
        yield Table(("source", "data set", "method", "speed-up", "tau", "here", f"{TAU_COLUMN} here"), tuple(rows), 3)
    others = tuple(_other(report, one) for one in report.published if one.differences)
    if others:
        yield Paragraph("Of other deployments, and therefore not beside it:")
        yield Listing(others)


def _published_row(report: Report, one: Published) -> tuple[str, ...]:
    figure = one.figure
    speedup = NONE if figure.speedup is None else f"{figure.speedup:g}x"
    names = (figure.source, _row_name(figure), report.titles.get(figure.method, figure.method))
    return *names, speedup, _tau(figure.tau), *_here(report, one)


def _other(report: Report, one: Published) -> str:
    figure = one.figure
    found = [] if figure.speedup is None else [f"{figure.speedup:g}x"]
    found += [] if figure.tau is None else [f"tau {figure.tau:.2f}"]
    name = report.titles.get(figure.method, TITLES.get(figure.method, figure.method))
    return f"{figure.source}: {_row_name(figure)}, {name}: {', '.join(found)}; {'; '.join(one.differences)}"


def _row_name(figure: Figure) -> str:
    category = "" if figure.category is None else f", {figure.category}"
    return figure.data_set + category + (f", concurrency {figure.concurrency}" if figure.concurrency else "")


def _here(report: Report, one: Published) -> tuple[str, str]:
    """This run's speed-up and tau in that row."""
    figure = one.figure
    if figure.category == AVERAGE:
        means = next((c.average for c in report.categories if c.average), None)
        if means is None:
            return NONE, NONE
        return f"{means.speedups[figure.method]:.2f}x", _tau(means.taus_of_drafting_passes.get(figure.method))
    line = next(line for line in report.data_sets if _same(line.name, figure.data_set))
    return _speedup(line, figure.method), _tau(line.by_method[figure.method].tau_of_drafting_passes)


def _same(name: str, other: str) -> bool:
    words = ["".join(c for c in text.lower() if c.isalnum()) for text in (name, other)]
    return words[0] == words[1]


def run_facts(run: Run) -> dict[str, str]:
    """Hardware, versions, command and seed, in words."""
    client, prompts, request = run.client, run.prompt_set, run.request
    gpus = f", {', '.join(client.gpus)}" if client.gpus else ", no GPU"
    thinking = f"thinking {request.thinking}, " if request.thinking else ""
    ended = "eos ignored" if request.ignore_eos else "natural end"
    endpoints = (
        f"{m.name}: {m.model} at {m.url}, {m.runtime} {m.runtime_version or 'of unknown version'}"
        + (f", with {m.overrides}" if m.overrides else "")
        for m in run.methods
    )
    return {
        "created": run.created,
        "server": run.server or "not told",
        "GPUs of a server": str(run.num_gpus) if run.num_gpus else "not told: throughput is per server",
        "load sent from": f"{client.cpu}, {client.cores} cores, {client.memory_gib:.0f} GiB{gpus}",
        "prompts": f"{prompts.name}: {prompts.num_prompts} from {prompts.source}, sha256 {prompts.sha256[:12]}",
        "requests": f"{request.template}, {thinking}temperature {request.temperature:g}, up to {request.max_tokens}"
        f" tokens, {ended}",
        "endpoints": "; ".join(endpoints),
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "command": command_line(run.command),
        "seed": str(run.seed),
    }


def factor_text(factor: Factor | None) -> str:
    """3.1x (2.9-3.3), or that there is none."""
    if factor is None or factor.value is None:
        return NONE
    spread = "" if factor.interval is None else f" ({factor.interval[0]:.2f}-{factor.interval[1]:.2f})"
    return f"{factor.value:.2f}x{spread}"


def _speedup(line: Line, name: str) -> str:
    found = line.by_method.get(name)
    return NONE if found is None else factor_text(found.speedup)


def _rate_of(line: Line, name: str) -> float | None:
    found = line.by_method.get(name)
    return None if found is None else found.rate


def _reached(one: Curve, at: AtSpeed) -> str:
    rate = at.gpu_rates[one.name]
    if rate is None:
        return "not measured" if one.front and at.user_rate < one.front[-1].user_rate else "does not reach"
    return _rate(rate)


def _rate(rate: float | None) -> str:
    return NONE if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}"


def _counts(*counts: int | None) -> list[str]:
    return [NONE if count is None else f"{count:,}" for count in counts]


def _tau(tau: float | None) -> str:
    return NONE if tau is None else f"{tau:.2f}"
