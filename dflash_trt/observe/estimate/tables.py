# SPDX-License-Identifier: Apache-2.0
"""An estimate as tables, picture and page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_trt.errors import human_bytes
from dflash_trt.files.write import new_file
from dflash_trt.observe.estimate.constants import Band
from dflash_trt.observe.estimate.estimate_text import caution, lead, title, verdict
from dflash_trt.observe.estimate.published_beside import published_lines
from dflash_trt.observe.estimate.report import Account, BatchLimit, Estimate, MethodCurve
from dflash_trt.observe.estimate.shapes import Method, System
from dflash_trt.observe.estimate.validation import NOT_VALIDATED, is_validated, mark
from dflash_trt.observe.pages.page_templates import PAGE, Table, render
from dflash_trt.observe.plots.curves import NARROW, Plot, PlotCurve, PlotPoint, svg
from dflash_trt.observe.plots.method_styles import STYLES, TITLES

MAX_INFLUENCES = 6


def plot(result: Estimate) -> Plot:
    curves = [
        PlotCurve(TITLES[curve.method], STYLES[curve.method], tuple(
            PlotPoint(
                user_rate=p.user_rate.value, gpu_rate=p.gpu_rate.value, label=str(p.point.batch),
                low=(p.user_rate.low, p.gpu_rate.low), high=(p.user_rate.high, p.gpu_rate.high),
            )
            for p in curve.points
        ))
        for curve in result.curves if curve.points
    ]  # fmt: skip
    return Plot(title=title(result), detail=lead(result).partition(";")[0], per="GPU", labels="batch",
                curves=tuple(curves))  # fmt: skip


def short_tables(result: Estimate) -> Iterator[Table]:
    """Speeds within the deployment's own range."""
    yield rate_table(result)
    yield batch_table(result)


def tables(result: Estimate) -> Iterator[Table]:
    """All tables, in reading order."""
    yield from short_tables(result)
    for account, curve in zip(result.accounts, result.curves, strict=True):
        yield step_table(account, curve.limit, result.system)
    yield from (curve_table(curve, result.system) for curve in result.curves)
    yield memory_table(result)
    if result.drafters:
        yield drafter_table(result)
    yield influence_table(result)


def rate_table(result: Estimate) -> Table:
    """Throughput of each method at a given speed per user."""
    rows = []
    for ratio in result.at_rates:
        plain, dflash = ratio.gpu_rates["none"], ratio.gpu_rates["dflash"]
        factor = f"{dflash / plain:.1f}x" if plain else "plain ends before" if dflash else ""
        rates = (f"{rate:,.0f}" if rate else "-" for rate in ratio.gpu_rates.values())
        rows.append((f"{ratio.user_rate:,.0f}", *rates, factor))
    named = (f"{TITLES[curve.method]}, tokens/s/GPU" for curve in result.curves)
    columns = ("tokens/s/user", *named, "DFlash / plain")
    unknown = [TITLES[curve.method] for curve in result.curves if not is_validated(result.system, curve.method)]
    said = f"; not validated: {', '.join(unknown)}" if unknown else ""
    title = f"throughput per GPU at a given speed{said}"
    return Table(title=title, columns=columns, rows=tuple(rows), num_text_columns=0)


def batch_table(result: Estimate) -> Table:
    """Methods side by side, at powers of two up to the deployment's max_batch_size."""
    others: list[Method] = [method for method in result.system.methods if method in ("ngram", "mtp")]
    methods: tuple[Method, ...] = ("none", "dflash", *others)
    plain, dflash, *beside = ({row.point.batch: row for row in result.curve(each).points} for each in methods)
    rows = []
    for batch in sorted(plain.keys() | dflash.keys()):
        if batch & (batch - 1) or batch > result.system.max_batch_size:
            continue
        at = [f"{row.user_rate.value:,.0f}" if row else "-" for row in (plain.get(batch), dflash.get(batch))]
        row, base = dflash.get(batch), plain.get(batch)
        ratio = f"{row.user_rate.value / base.user_rate.value:.1f}x" if row and base else "-"
        drafts = "-" if row is None else str(row.point.num_draft_tokens)
        gains = (
            f"{each[batch].user_rate.value / base.user_rate.value:.1f}x" if base and batch in each else "-"
            for each in beside
        )
        gpu = "-" if row is None else f"{row.gpu_rate.value:,.0f}"
        rows.append((str(batch), at[0], *gains, drafts, at[1], ratio, gpu))
    named = (f"{TITLES[method]} / plain" for method in others)
    columns = ("batch", "plain, tokens/s/user", *named, "drafts", "DFlash, tokens/s/user", "DFlash / plain",
               "DFlash, tokens/s/GPU")  # fmt: skip
    return Table(title="at equal batch", columns=columns, rows=tuple(rows), num_text_columns=0)


def step_table(account: Account, limit: BatchLimit, system: System) -> Table:
    at, total = account.point, sum(term.seconds for term in account.terms)
    experts = f", {account.experts_touched:.0f} experts a layer" if account.experts_touched else ""
    excess = "" if at.batch <= limit.batch else f"; too large, {_allowed(limit)}"
    sums = ("all", "", total, sum(term.bytes for term in account.terms))
    rows = tuple(
        (part, name + mark(system, part, name), f"{seconds * 1e6:,.0f}", f"{seconds / total:.0%}",
         human_bytes(round(read)) if read else "")
        for part, name, seconds, read in [*((t.part, t.name, t.seconds, t.bytes) for t in account.terms), sums]
    )  # fmt: skip
    return Table(
        title=f"one step, {TITLES[at.method]}: batch {at.batch}, {at.num_draft_tokens} drafts, tau {at.tau:.2f}"
        f"{experts}{excess}",
        columns=("part", "term", "us", "share", "read"), rows=rows, num_text_columns=2,
    )  # fmt: skip


def curve_table(curve: MethodCurve, system: System) -> Table:
    """Powers of two of the batch; --json has all."""
    rows = tuple(
        (str(p.batch), str(p.num_draft_tokens), f"{p.tau:.2f}", f"{p.step_seconds * 1e3:.2f}",
         _band(banded.user_rate), _band(banded.gpu_rate))
        for banded in curve.points if (p := banded.point).batch & (p.batch - 1) == 0
    )  # fmt: skip
    return Table(
        title=f"{_title(curve.method, system)}: {_allowed(curve.limit)}, the deployment sets {system.max_batch_size}",
        rows=rows,
        columns=("batch", "drafts", "tau", "step, ms", "tokens/s/user", "tokens/s/GPU"), num_text_columns=0,
    )  # fmt: skip


def memory_table(result: Estimate) -> Table:
    system, items = result.system, result.curve("dflash").memory
    free = system.gpu_memory_bytes - sum(item.bytes for item in items)
    rows = [(item.name, human_bytes(item.bytes)) for item in items]
    rows.append((f"free of {human_bytes(system.gpu_memory_bytes)}", ("-" if free < 0 else "") + human_bytes(abs(free))))
    requests = f"{system.max_batch_size} requests of {result.traffic.max_tokens} tokens"
    return Table(title=f"memory of one GPU, DFlash: {requests}", columns=("item", "bytes"), rows=tuple(rows))


def drafter_table(result: Estimate) -> Table:
    """Effect of sharing the drafter among the ranks."""
    batches = result.drafters[0].seconds
    rows = tuple(
        (
            each.name, *(f"{each.seconds[batch] * 1e6:,.0f}" for batch in batches), human_bytes(each.weight_bytes),
            human_bytes(each.context_bytes),
        )
        for each in result.drafters
    )  # fmt: skip
    columns = ("drafter", *(f"us a pass, batch {batch}" for batch in batches), "weights", "context")
    title = f"the drafter on one GPU; context of a request of {result.system.max_seq_len:,} tokens"
    return Table(title=title, columns=columns, rows=rows)


def influence_table(result: Estimate) -> Table:
    rows = tuple((i.constant, f"{i.at_low - 1:+.1%}", f"{i.at_high - 1:+.1%}") for i in result.influences)
    return Table(
        title="what changes one user's speed most, DFlash", rows=rows[:MAX_INFLUENCES],
        columns=("constant", "at its low end", "at its high end"),
    )  # fmt: skip


def _title(method: Method, system: System) -> str:
    return TITLES[method] + ("" if is_validated(system, method) else NOT_VALIDATED)


def _allowed(limit: BatchLimit) -> str:
    return f"memory allows batch {limit.batch:,} ({limit.reason})"


def _band(band: Band) -> str:
    return f"{band.value:,.0f} ({band.low:,.0f}-{band.high:,.0f})"


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
