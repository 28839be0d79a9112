# SPDX-License-Identifier: Apache-2.0
"""Predictions beside published measurements, and the table of them in benchmarks/RESULTS.md (run as a module).

Points are marked by what they were used for. calibration: a constant was fitted to it. open: compared while the terms
were chosen. held out: looked at after all constants stood.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.observe.estimate.constants import Band, Rates, constants, vary
from dflash_trt.observe.estimate.constants import rates as rates_of
from dflash_trt.observe.estimate.curve import AcceptanceProfile, Traffic, from_tau, point, points, rate_at
from dflash_trt.observe.estimate.inputs import draft_shape, eagle3_shape, target_shape
from dflash_trt.observe.estimate.shapes import System
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.observe.plots.curves import frontier
from tools import measured_passes
from tools.published_points import PublishedPoint, Quantity, published_points

UNITS: dict[Quantity, str] = {
    "ratio": "x plain", "user": "tokens/s/user", "total": "tokens/s", "gpu": "tokens/s/GPU",
    "gpu-best": "tokens/s/GPU", "pareto": "x plain, per GPU", "pareto-eagle3": "x EAGLE-3, per GPU",
}  # fmt: skip
AIM = 0.25
MAX_BATCH = 1024
MARKS = "<!-- {name}: begin -->", "<!-- {name}: end -->"
PAGE = Path(__file__).parents[1] / "benchmarks" / "RESULTS.md"


def system_of(published: PublishedPoint) -> System:
    """The system that was measured."""
    target = msgspec.structs.replace(
        target_shape(published.target), weight_bits=published.weight_bits, head_bits=published.head_bits
    )
    return System(
        target=target,
        draft=None if published.draft is None else draft_shape(published.draft, published.algorithm, published.runtime),
        eagle3=eagle3_shape(target),
        gpu=known_gpu(published.gpu),
        gpu_memory_bytes=0,
        num_gpus=published.tensor_parallel,
        tensor_parallel=published.tensor_parallel,
        expert_parallel=published.expert_parallel,
        drafter_ranks=1 if published.attention_dp else published.tensor_parallel,
        runtime=published.runtime,
        attention_dp=published.attention_dp,
        kv_bytes=published.kv_bytes,
    )


def predict(published: PublishedPoint, rates: Rates) -> float:
    """Predicts the quantity of a point from the cost model."""
    model = StepModel(system_of(published), rates)
    traffic = Traffic(prompt_tokens=published.prompt_tokens, output_tokens=published.output_tokens)
    acceptance = from_tau(published.tau, published.num_draft_tokens) if published.num_draft_tokens else None
    if published.quantity in ("pareto", "pareto-eagle3"):
        return _pareto(published, model, acceptance, traffic)
    if published.quantity == "gpu-best":
        return max(p.gpu_rate for p in points(model, published.method, acceptance, traffic, 4 * MAX_BATCH))
    at = point(model, published.method, acceptance, traffic, published.batch, published.num_draft_tokens)
    if published.quantity == "ratio":
        return at.user_rate / point(model, "none", None, traffic, published.batch, 0).user_rate
    return {"user": at.user_rate, "total": at.user_rate * at.batch, "gpu": at.gpu_rate}[published.quantity]


def _pareto(
    published: PublishedPoint, model: StepModel, acceptance: AcceptanceProfile | None, traffic: Traffic
) -> float:
    """DFlash's throughput per GPU at a speed over the other method's; where that ends before, over its last point."""
    if published.quantity == "pareto":
        theirs = frontier(points(model, "none", None, traffic, MAX_BATCH))
    else:
        eagle3 = AcceptanceProfile((constants().eagle3["eagle3_acceptance"].value,))
        theirs = frontier(points(model, "eagle3", eagle3, traffic, MAX_BATCH))
    ours = rate_at(frontier(points(model, "dflash", acceptance, traffic, MAX_BATCH)), published.user_rate)
    return ours / (rate_at(theirs, published.user_rate) or theirs[0].gpu_rate)


def predict_with_band(published: PublishedPoint) -> Band:
    """The prediction, and what the ranges of the constants make of it."""
    bands, _ = vary(system_of(published).gpu, published.runtime, lambda rates: [predict(published, rates)])
    return bands[0]


def error_of(published: PublishedPoint, value: float) -> float:
    """Predicted over published, minus 1; 0 where a published lower bound holds."""
    return 0.0 if published.bound and value >= published.published else value / published.published - 1


def table() -> str:
    """The table of benchmarks/RESULTS.md, in Markdown, and the counts below it."""
    lines = [
        "| point | published | predicted | range | error | used for | source; what is missing |",
        "|---|---|---|---|---|---|---|",
    ]
    within: dict[str, list[bool]] = {}
    for published in published_points().points:
        band = predict_with_band(published)
        error = error_of(published, band.value)
        within.setdefault(published.use, []).append(abs(error) <= AIM)
        note = published.source + (f". **Missing**: {published.missing}" if published.missing else "")
        bound = "> " if published.bound else ""
        lines.append(
            f"| {published.id} | {bound}{_number(published.published)} {UNITS[published.quantity]} |"
            f" {_number(band.value)} | {_number(band.low)} - {_number(band.high)} |"
            f" {'holds' if published.bound and not error else f'{error:+.0%}'} | {published.use} | {note} |"
        )
    counts = [f"{sum(held)} of {len(held)} {use}" for use, held in sorted(within.items())]
    return "\n".join([*lines, "", f"Within {AIM:.0%}: {', '.join(counts)}."])


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 20 else f"{value:,.0f}"


def replace_tables(page: str) -> str:
    """`page` with the present table and list between their marks."""
    texts = {
        "table": table(), "not predicted": _list(), "ends": ends(), "passes": measured_passes.table(),
        "backends": measured_passes.counts(),
    }  # fmt: skip
    for name, text in texts.items():
        begin, end = (mark.format(name=name) for mark in MARKS)
        assert begin in page
        assert end in page
        page = re.sub(f"{begin}.*{end}", f"{begin}\n{text}\n{end}".replace("\\", r"\\"), page, flags=re.DOTALL)
    return page


def ends() -> str:
    """How the blog's factor of 15 depends on where plain's curve ends: the same curve, scaled to end elsewhere."""
    published = next(p for p in published_points().points if p.id == "blog-15x")
    model = StepModel(system_of(published), rates_of(system_of(published).gpu, published.runtime))
    traffic = Traffic(prompt_tokens=published.prompt_tokens, output_tokens=published.output_tokens)
    ours = frontier(points(model, "dflash", from_tau(published.tau, published.num_draft_tokens), traffic, MAX_BATCH))
    plain = frontier(points(model, "none", None, traffic, MAX_BATCH))
    lines = ["| plain ends at, tokens/s/user | at 400 | at 500 | at 550 | at 600 |", "|---|---|---|---|---|"]
    for end in (plain[0].user_rate, 480.0, 520.0, 560.0, 620.0):
        scale = end / plain[0].user_rate
        cells = []
        for rate in (400.0, 500.0, 550.0, 600.0):
            theirs = scale * rate_at(plain, rate / scale)
            cells.append(f"{rate_at(ours, rate) / theirs:.0f}x" if theirs else "no plain point")
        lines.append(f"| {end:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _list() -> str:
    return "\n".join(f"* {what}: {why}" for what, why in published_points().not_predicted)


def main() -> None:
    """Rewrites the table of benchmarks/RESULTS.md, or prints it where there is no checkout."""
    if PAGE.is_file():
        PAGE.write_text(replace_tables(PAGE.read_text()))
    else:
        sys.stdout.write(f"{table()}\n\n{_list()}\n")


if __name__ == "__main__":
    main()
