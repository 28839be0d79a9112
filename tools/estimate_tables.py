# SPDX-License-Identifier: Apache-2.0
"""Predictions beside published measurements: the tables of benchmarks/RESULTS.md, and how many held out are near.

Points are listed by what they were used for. calibration: a constant was fitted to it. open: compared while the terms
were chosen. held out: looked at after all constants stood; `estimate` tells of those (data/held_out.json).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from dflash_trt.checkpoint.draft_spec import BlockConv, MarkovHead, SelectorSizes
from dflash_trt.checkpoint.draft_tensors import linear_shapes
from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.sizes import draft_sizes
from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile, from_tau
from dflash_trt.observe.estimate.constants import DATA, Band, Rates, constants, vary
from dflash_trt.observe.estimate.constants import rates as rates_of
from dflash_trt.observe.estimate.curve import Traffic, point, points, rate_at
from dflash_trt.observe.estimate.drafter_pass import dflash_shape
from dflash_trt.observe.estimate.inputs import eagle3_shape, target_shape
from dflash_trt.observe.estimate.other_drafts import mtp_shape
from dflash_trt.observe.estimate.shapes import DraftShape, Method, System
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.observe.estimate.validation import AIM, HeldOut, kind_of
from dflash_trt.observe.plots.frontier import frontier
from tools import measured_passes
from tools.published_points import PublishedPoint, Quantity, published_points

UNITS: dict[Quantity, str] = {
    "ratio": "x plain", "user": "tokens/s/user", "total": "tokens/s", "gpu": "tokens/s/GPU",
    "gpu-best": "tokens/s/GPU", "pareto": "x plain, per GPU", "pareto-eagle3": "x EAGLE-3, per GPU",
}  # fmt: skip
MAX_BATCH = 1024
HEADS: dict[str, dict[str, object]] = {
    "DFlash2": {"block_conv": BlockConv(kernel_size=2, group_size=16),
                "candidate_selector": SelectorSizes(rank=256, top_k=16)},
    "DSpark": {"markov_head": MarkovHead(rank=256, confidence=True)},
}  # fmt: skip
MARKS = "<!-- {name}: begin -->", "<!-- {name}: end -->"
PAGE = Path(__file__).parents[1] / "benchmarks" / "RESULTS.md"


def system_of(published: PublishedPoint) -> System:
    """The system that was measured."""
    target = msgspec.structs.replace(
        target_shape(published.target), weight_bits=published.weight_bits, head_bits=published.head_bits
    )
    head = {"vocab_size": target.vocab_size, **HEADS[published.head]} if published.head else {}
    draft = published.draft and draft_shape(published.draft, published.algorithm, published.runtime, **head)
    return System(
        target=target,
        draft=draft or None,
        eagle3=eagle3_shape(target),
        mtp=mtp_shape(target, published.num_draft_tokens) if published.method == "mtp" else None,
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


def draft_shape(name: str, algorithm: str = "", backend: str | None = None, **changes: object) -> DraftShape:
    """A draft by directory or repository id, some facts changed, every linear layer but fc quantised by `algorithm`."""
    sizes = draft_sizes(name)
    if sizes is None:
        names = ", ".join(sorted(published_drafts()))
        raise ConfigError(f"the facts of draft {name!r} are unknown (known: {names})")
    spec = msgspec.structs.replace(sizes.spec, **changes)
    modules = [module for module in linear_shapes(spec) if module != "fc"]
    return dflash_shape(spec, dict.fromkeys(modules, algorithm), name=name, backend=backend)


def predict(published: PublishedPoint, rates: Rates) -> float:
    """Predicts the quantity of a point from the cost model."""
    model = StepModel(system_of(published), rates)
    traffic = Traffic(prompt_tokens=published.prompt_tokens, output_tokens=published.output_tokens)
    acceptance = from_tau(published.tau, published.num_draft_tokens) if published.num_draft_tokens else None
    if published.quantity in ("pareto", "pareto-eagle3"):
        return _pareto(published, model, acceptance, traffic)
    if published.quantity == "gpu-best":
        return max(p.gpu_rate for p in points(model, published.method, acceptance, traffic, 4 * MAX_BATCH))
    if published.num_requests:
        return _run_rate(published, model, acceptance, traffic)
    at = point(model, published.method, acceptance, traffic, published.batch, published.num_draft_tokens)
    if published.quantity == "ratio":
        return at.user_rate / point(model, "none", None, traffic, published.batch, 0).user_rate
    return {"user": at.user_rate, "total": at.user_rate * at.batch, "gpu": at.gpu_rate}[published.quantity]


def _run_rate(
    published: PublishedPoint, model: StepModel, acceptance: AcceptanceProfile | None, traffic: Traffic
) -> float:
    """Tokens/s/GPU of a run whose requests all wait at its start: they begin and end in waves, the last one smaller."""
    waves, rest = divmod(published.num_requests, published.batch)

    def seconds(batch: int) -> float:
        at = point(model, published.method, acceptance, traffic, batch, published.num_draft_tokens)
        return traffic.output_tokens / at.user_rate

    total = waves * seconds(published.batch) + (seconds(rest) if rest else 0.0)
    return published.num_requests * traffic.output_tokens / total / model.system.num_gpus


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
    """The prediction and its band over the ranges of the constants."""
    bands, _ = vary(system_of(published).gpu, published.runtime, lambda rates: [predict(published, rates)])
    return bands[0]


def error_of(published: PublishedPoint, value: float) -> float:
    """Predicted over published, minus 1."""
    return value / published.published - 1


def is_near(published: PublishedPoint, value: float) -> bool | None:
    """Whether a prediction is within AIM; None for a published bound, which any large, or small, number satisfies."""
    return None if published.bound else abs(error_of(published, value)) <= AIM


Compared = list[tuple[PublishedPoint, Band]]


def compared() -> Compared:
    """Every point with its prediction."""
    return [(published, predict_with_band(published)) for published in published_points().points]


def table(points: Compared, *, held_out: bool) -> str:
    """The points that were held out, or all others, in Markdown, and the count below them."""
    lines = [
        "| point | published | predicted | range | error | used for | source; what is missing |",
        "|---|---|---|---|---|---|---|",
    ]
    within: dict[str, list[bool]] = {}
    in_range = []
    for published, band in points:
        if (published.use == "held out") != held_out:
            continue
        error = error_of(published, band.value)
        if (near := is_near(published, band.value)) is not None:
            within.setdefault(published.use, []).append(near)
            in_range.append(band.low <= published.published <= band.high)
        note = published.source + (f". **Missing**: {published.missing}" if published.missing else "")
        bound = {"": "", "at least": "> ", "at most": "< "}[published.bound]
        lines.append(
            f"| {published.id} | {bound}{_number(published.published)} {UNITS[published.quantity]} |"
            f" {_number(band.value)} | {_number(band.low)} - {_number(band.high)} |"
            f" {error:+.0%}{'; a bound, not counted' if published.bound else ''} | {published.use} | {note} |"
        )
    counts = [f"{sum(held)} of {len(held)} {use}" for use, held in sorted(within.items())]
    ranges = f"inside the range: {sum(in_range)} of {len(in_range)}"
    return "\n".join([*lines, "", f"Within {AIM:.0%}: {', '.join(counts)}; {ranges}."])


def held_out(points: Compared) -> list[HeldOut]:
    """How many that were held out came near, by kind of target, GPU and method."""
    near: dict[tuple[str, str, Method], list[bool]] = {}
    for published, band in points:
        if published.use == "held out" and (is_within := is_near(published, band.value)) is not None:
            key = (kind_of(target_shape(published.target)), published.gpu, published.method)
            near.setdefault(key, []).append(is_within)
    return [
        HeldOut(kind=kind, gpu=gpu, method=method, within=sum(held), of=len(held))
        for (kind, gpu, method), held in sorted(near.items())
    ]


def counts(points: Compared) -> str:
    """The held out by kind of target and GPU, in Markdown."""
    lines = ["| target | GPU | method | within 25 % |", "|---|---|---|---|"]
    lines += [f"| {e.kind} | {e.gpu} | {e.method} | {e.within} of {e.of} |" for e in held_out(points)]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 20 else f"{value:,.0f}"


def replace_tables(page: str, points: Compared) -> str:
    """`page` with the present tables and list between their marks."""
    texts = {
        "held out": table(points, held_out=True), "table": table(points, held_out=False), "counts": counts(points),
        "not predicted": _list(), "ends": ends(), "passes": measured_passes.table(),
        "backends": measured_passes.counts(),
    }  # fmt: skip
    for name, text in texts.items():
        begin, end = (mark.format(name=name) for mark in MARKS)
        assert begin in page
        assert end in page
        page = re.sub(f"{begin}.*{end}", f"{begin}\n{text}\n{end}".replace("\\", r"\\"), page, flags=re.DOTALL)
    return page


def held_out_file(points: Compared) -> str:
    """The text of data/held_out.json, a row a line."""
    rows = ",\n".join(f" {msgspec.json.encode(each).decode()}" for each in held_out(points))
    return f"[\n{rows}\n]\n"


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
    """Rewrites the tables of benchmarks/RESULTS.md and data/held_out.json; prints how near the held out came."""
    points = compared()
    PAGE.write_text(replace_tables(PAGE.read_text(), points))
    (DATA / "held_out.json").write_text(held_out_file(points))
    sys.stdout.write(f"{counts(points)}\n\n{table(points, held_out=True).splitlines()[-1]}\n")


if __name__ == "__main__":
    main()
