# SPDX-License-Identifier: Apache-2.0
"""The page of `dflash-trt estimate --html`: one file, no script, nothing loaded; light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from dflash_trt import __version__
from dflash_trt.files.write import new_file
from dflash_trt.observe.estimate.report import Estimate
from dflash_trt.observe.estimate.svg import curve_svg
from dflash_trt.observe.plots.methods import TITLES
from dflash_trt.observe.plots.page_parts import PAGE, document, table


def write_page(result: Estimate, file: Path) -> None:
    """Writes the page; raises BuildError where `file` is no page of ours, or cannot be written."""
    with new_file(file, PAGE, force=True) as new:
        new.write_text(page(result), encoding="utf-8")


def page(result: Estimate) -> str:
    """The page as text; the same estimate gives the same bytes."""
    system, traffic = result.system, result.traffic
    title = f"{system.target.target} on {system.gpu}x{system.num_gpus}"
    shape = f"TP {system.tensor_parallel}, EP {system.expert_parallel}, {system.runtime}"
    lead = (
        f"{shape}; {traffic.prompt_tokens} prompt and {traffic.output_tokens} output tokens; DFlash:"
        f" {result.acceptance_source}; EAGLE-3: an assumed shape."
        " Predicted from sizes and published kernel times, not measured; bands follow from"
        " the ranges of the constants. Hover a point for its batch and draft length."
    )
    sections = [
        curve_svg(result),
        "<h2>Throughput per GPU at a given speed</h2>", _rates(result),
        *_accounts(result),
        "<h2>Memory of one GPU</h2>", _memory(result),
        "<h2>What moves the speed of one user most, DFlash</h2>", _influences(result),
    ]  # fmt: skip
    body = f'<h1>{escape(title)}</h1><p class="soft">{escape(lead)}</p>\n' + "\n".join(sections)
    end = f'\n<p class="soft">dflash-trt {escape(__version__)}, deployment {escape(result.name)}</p>'
    return document(title, body + end)


def _rates(result: Estimate) -> str:
    rows = []
    for ratio in result.at_rates:
        plain, dflash = ratio.gpu_rates["none"], ratio.gpu_rates["dflash"]
        times = f"{dflash / plain:.1f}x" if plain else "plain ends before" if dflash else ""
        rows.append((f"{ratio.user_rate:,.0f}", *(f"{r:,.0f}" if r else "-" for r in ratio.gpu_rates.values()), times))
    return table(("tokens/s/user", *(TITLES[m] for m in result.at_rates[0].gpu_rates), "DFlash / plain"), rows)


def _accounts(result: Estimate) -> Iterable[str]:
    for account in result.accounts:
        at = account.point
        total = sum(term.seconds for term in account.terms)
        yield (
            f"<h2>One step, {TITLES[at.method]}: batch {at.batch}, {at.draft_tokens} drafts, {total * 1e3:.2f} ms</h2>"
        )
        yield table(
            ("term", "part", "us", "share", "MB read"),
            [
                (t.name, t.part, f"{t.seconds * 1e6:,.0f}", f"{t.seconds / total:.0%}", f"{t.bytes / 1e6:,.1f}")
                for t in account.terms
            ],
            texts=2,
        )


def _memory(result: Estimate) -> str:
    system, traffic = result.system, result.traffic
    lines = [
        f"{TITLES[curve.method]}: up to batch {curve.limit.batch:,} at {traffic.max_tokens:,} tokens"
        f" ({curve.limit.reason})"
        for curve in result.curves
    ]
    rows = [(item.name, f"{item.bytes / 1e9:,.2f}") for item in result.curve("dflash").memory]
    used = sum(item.bytes for item in result.curve("dflash").memory)
    rows.append((f"free of {system.gpu_memory_bytes / 1e9:,.0f}", f"{(system.gpu_memory_bytes - used) / 1e9:,.2f}"))
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{listed}</ul>" + table((f"DFlash, {system.max_batch_size} requests", "GB"), rows)


def _influences(result: Estimate) -> str:
    rows = [(i.constant, f"{i.at_low - 1:+.1%}", f"{i.at_high - 1:+.1%}") for i in result.influences[:8]]
    return table(("constant", "at its low end", "at its high end"), rows)
