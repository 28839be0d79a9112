# SPDX-License-Identifier: Apache-2.0
"""An estimate as tables and a picture, for the terminal and the page, with notes on the accuracy of predictions.

data/held_out.json, written by `python tools/estimate_tables.py`, has published speeds that were compared only after all
constants were fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec

from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.errors import human_bytes
from dflash_trt.files.json_file import package_data
from dflash_trt.files.write import new_file
from dflash_trt.observe.estimate.constants import DATA, Band, rates
from dflash_trt.observe.estimate.report import Account, Estimate, MethodCurve
from dflash_trt.observe.estimate.shapes import METHODS, Method, System
from dflash_trt.observe.pages.page_templates import PAGE, Table, render
from dflash_trt.observe.plots.curves import NARROW, STYLES, TITLES, Plot, PlotCurve, PlotPoint, svg

AIM = 0.25
NOT_VALIDATED = " (not validated)"
OF_THE_KIND = {"delta nets, state": "delta nets", "latent projections": "latent attention"}
"""Terms of a step that only targets of one kind have."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Published speeds, or ratios, of one kind of target on one GPU by one method."""

    kind: str
    gpu: str
    method: Method
    within: int
    """Number within AIM of the prediction."""
    of: int


def kind_of(target: TargetShape) -> str:
    """Kinds of a target's layers: attention and MLPs."""
    mlps = "experts" if target.num_experts else "dense"
    if target.latent is not None:
        return f"latent attention, {mlps}"
    return f"delta nets, {mlps}" if target.num_linear_layers else mlps


@cache
def held_out() -> tuple[HeldOut, ...]:
    return package_data(DATA / "held_out.json", tuple[HeldOut, ...])


def of_system(system: System) -> list[HeldOut]:
    """Counts for the system's kind of target on its GPU; no server with our plans of a drafter has been measured."""
    like = [each for each in held_out() if (each.kind, each.gpu) == (kind_of(system.target), system.gpu.name)]
    return [each for each in like if each.method != "dflash" or not _has_plans(system)]


def _has_plans(system: System) -> bool:
    return system.draft is not None and system.draft.has_our_kernel


def summary(system: System) -> str:
    """How good predictions have been: all of them, and those of this kind of target on this GPU."""
    known = {each.method: each for each in of_system(system)}
    names: dict[Method, str] = {"none": "plain", "eagle3": "EAGLE-3", "dflash": "DFlash"}
    shown = ", ".join(f"{names[m]} {known[m].within} of {known[m].of}" for m in METHODS if m in known)
    like = f"like this ({kind_of(system.target)}; {system.gpu.name})"
    own = f"{like}: {shown}" if shown else f"none was {like}, so what follows is not validated"
    if shown and _has_plans(system):
        own += ", none with the drafter in TensorRT plans"
    return f"{_sum(held_out())} published speeds that were held out lay within {AIM:.0%}; {own}"


def _sum(counts: Sequence[HeldOut]) -> str:
    return f"{sum(each.within for each in counts)} of {sum(each.of for each in counts)}"


def is_validated(system: System, method: Method) -> bool:
    """Whether anything published was held against this method, kind of target and GPU."""
    return any(each.method == method for each in of_system(system))


def mark(system: System, part: str, term: str) -> str:
    """Suffix that marks an unvalidated term."""
    if part == "drafter" and _has_plans(system):
        return NOT_VALIDATED
    layers = OF_THE_KIND.get(term)
    if layers and not any(each.kind.startswith(layers) for each in held_out()):
        return NOT_VALIDATED
    return ""


FP8_BITS = 8
MAX_INFLUENCES = 6


def title(result: Estimate) -> str:
    system = result.system
    return f"{system.target.target} on {system.gpu.name}x{system.num_gpus}: predicted, not measured"


def verdict(result: Estimate, replicas: int = 1) -> str:
    """Speed of one user, gain of drafts, most throughput."""
    plain, dflash = ((curve.points[0].user_rate if curve.points else None)
                     for curve in (result.curve("none"), result.curve("dflash")))  # fmt: skip
    if dflash is None:
        return "DFlash: no request fits"
    ratio = "" if plain is None else f", {dflash.value / plain.value:.1f}x plain decoding"
    most = max(point.gpu_rate.value for point in result.curve("dflash").points)
    servers = ""
    if replicas > 1:
        num_gpus = replicas * result.system.num_gpus
        servers = f" {replicas} servers on {num_gpus} GPUs: {most * num_gpus:,.0f} tokens/s at most, evenly divided."
    return (
        f"DFlash: one user gets {dflash.value:,.0f} tokens/s ({dflash.low:,.0f} to {dflash.high:,.0f} over constants'"
        f" ranges){ratio}; a GPU at most {most:,.0f} tokens/s.{servers}"
    )


def caution(system: System) -> str:
    """Warnings where predictions are known to be too high; "" elsewhere."""
    said = []
    has_fp4 = rates(system.gpu, system.runtime).fp4_flops > 0
    if not has_fp4 and system.target.expert_bits < FP8_BITS:
        said.append(
            "for four-bit experts on GPUs without FP4 (Hopper), TensorRT-LLM publishes 1.1 to 1.5 times less"
            " throughput at saturation than predicted, and 1.7 to 2.4 times less with attention data parallelism. The"
            " ranges hold what it publishes."
        )
    if system.runtime == "vllm" and system.target.num_linear_layers:
        said.append(
            "of a target with delta nets vLLM prepares each layer's cache anew in every step once it drafts: on an"
            " H100 Qwen3.5-4B got 1.2x plain decoding where 3.7x is predicted (vLLM #49730)."
        )
    return "\n".join(f"Caution: {each}" for each in said)


def lead(result: Estimate) -> str:
    """The question, and what kind of figures answer it."""
    system, traffic = result.system, result.traffic
    return (
        f"TP {system.tensor_parallel}, EP {system.expert_parallel}, {system.runtime}; {traffic.prompt_tokens} prompt"
        f" and {traffic.output_tokens} output tokens; DFlash: {result.acceptance_source}; EAGLE-3: an assumed shape."
        " Predicted from sizes and published kernel times; bands follow from the ranges of the constants."
        f" {summary(system)} (docs/estimate.md)."
    )


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


def tables(result: Estimate) -> Iterator[Table]:
    """All, in the order in which they are read."""
    yield rate_table(result)
    yield from (step_table(account, result.system) for account in result.accounts)
    yield from (curve_table(curve, result.system) for curve in result.curves)
    yield memory_table(result)
    if result.drafters:
        yield drafter_table(result)
    yield influence_table(result)


def rate_table(result: Estimate) -> Table:
    """Throughput of each method where users get a speed."""
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


def step_table(account: Account, system: System) -> Table:
    at, total = account.point, sum(term.seconds for term in account.terms)
    experts = f", {account.experts_touched:.0f} experts a layer" if account.experts_touched else ""
    sums = ("all", "", total, sum(term.bytes for term in account.terms))
    rows = tuple(
        (part, name + mark(system, part, name), f"{seconds * 1e6:,.0f}", f"{seconds / total:.0%}",
         human_bytes(round(read)) if read else "")
        for part, name, seconds, read in [*((t.part, t.name, t.seconds, t.bytes) for t in account.terms), sums]
    )  # fmt: skip
    return Table(
        title=f"one step, {TITLES[at.method]}: batch {at.batch}, {at.num_draft_tokens} drafts, tau {at.tau:.2f}"
        f"{experts}",
        columns=("part", "term", "us", "share", "read"), rows=rows, num_text_columns=2,
    )  # fmt: skip


def curve_table(curve: MethodCurve, system: System) -> Table:
    """Powers of two of the batch; --json has all."""
    rows = tuple(
        (str(p.batch), str(p.num_draft_tokens), f"{p.tau:.2f}", f"{p.step_seconds * 1e3:.2f}",
         _band(banded.user_rate), _band(banded.gpu_rate))
        for banded in curve.points if (p := banded.point).batch & (p.batch - 1) == 0
    )  # fmt: skip
    limit = f"batch {curve.limit.batch:,} ({curve.limit.reason})"
    return Table(
        title=f"{_title(curve.method, system)}: memory allows {limit}, the deployment sets {system.max_batch_size}",
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
        "estimate.j2", "html", name=result.name, title=title(result), verdict=verdict(result), lead=lead(result),
        caution=caution(result.system),
        picture={"alt": picture.description, "wide": svg(picture), "narrow": svg(picture, NARROW)},
        tables=list(tables(result)),
    )  # fmt: skip
