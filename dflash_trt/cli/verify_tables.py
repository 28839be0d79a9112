# SPDX-License-Identifier: Apache-2.0
"""Tables of `dflash-trt verify`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dflash_trt.cli.output import print_table

if TYPE_CHECKING:
    from dflash_trt.runtime.measure.replay import PromptGroup, ReplayReport
    from dflash_trt.runtime.measure.statistics import Mean
    from dflash_trt.runtime.measure.verification_report import (
        Comparison,
        DrafterError,
        EngineFigures,
        EngineReport,
        VerificationReport,
    )


def print_report(report: VerificationReport) -> None:
    """Prints one table each for the verdict, acceptance by position and error by layer."""
    engines = {"engine": report.engine} | ({} if report.reference is None else {"reference": report.reference})
    lossless = all(engine.identical for engine in engines.values())
    title = "identical to plain greedy decoding" if lossless else "TOKENS DIFFER from plain greedy decoding"
    rows = [
        ("prompts identical", *map(_identical, engines.values())),
        ("target in", *[report.target_dtype] * len(engines)),
        ("tau", *("-" if engine.tau is None else f"{engine.tau:.3f}" for engine in engines.values())),
    ]
    _print_engines(title, engines, report.comparison, rows)
    if report.comparison is not None and (error := report.comparison.error) is not None:
        title = f"relative error against the reference, mean of {error.num_blocks} blocks"
        print_table(title, ("after layer", "residual stream", "context K", "context V"), _error_rows(error))


def print_replay_report(report: ReplayReport) -> None:
    """Prints tables of tau, acceptance by position, and tau by category and language, for --features."""
    engines = {"engine": report.engine} | ({} if report.reference is None else {"reference": report.reference})
    text = f" sampled at temperature {report.text_temperature:g}" if report.text_temperature else ""
    title = f"{len(report.engine.prompts)} captured answers{text}, replayed"
    rows = [("tau", *(_mean(engine.tau_interval) for engine in engines.values()))]
    _print_engines(title, engines, report.comparison, rows)
    losses = [_loss_title(engines)] if report.reference is not None else []
    for title, groups in (("by category", report.by_category), ("by language", report.by_language)):
        if groups:
            print_table(title, ("", "prompts", *engines, *losses), _groups(groups))


def _print_engines(
    title: str, engines: Mapping[str, EngineFigures], comparison: Comparison | None, rows: list[tuple[str, ...]]
) -> None:
    """A table with `rows` of what both reports say besides, and one with a row a draft position."""
    from dflash_trt.runtime.measure.statistics import loss_text

    listed = engines.values()
    table = [
        ("draft", *(engine.source for engine in listed)),
        ("quantised", *map(_quantization, listed)),
        ("verify passes", *(str(engine.steps) for engine in listed)),
        *rows,
    ]
    if comparison is not None:
        table.append((_loss_title(engines), loss_text(comparison.tau_loss)))
        if worst := min(comparison.tau_differences, key=lambda prompt: prompt.difference, default=None):
            table.append(("worst prompt", f"{worst.difference:+.3f} ({worst.name})"))
    print_table(title, ("", *engines), table)
    by_position = zip(*(engine.acceptance for engine in listed), strict=True)
    shares = [(str(row[0].position), *(_share(entry.share) for entry in row)) for row in by_position]
    print_table("acceptance by draft position", ("position", *engines), shares)


def _loss_title(engines: Mapping[str, EngineFigures]) -> str:
    """The name of a loss: one draft may be compared with itself, or with another kind of draft."""
    kind = engines["reference"].kind
    return "tau loss" if engines["engine"].kind == kind else f"tau below {kind}'s"


def _identical(engine: EngineReport) -> str:
    return f"{sum(p.first_difference is None for p in engine.prompts)} of {len(engine.prompts)}"


def _quantization(engine: EngineFigures) -> str:
    """'12 modules NVFP4, FP8 context cache'."""
    parts = [f"{count} modules {algorithm}" for algorithm, count in engine.quantized_modules.items()]
    return ", ".join([*parts, *(["FP8 context cache"] if engine.fp8_kv_cache else [])]) or "no"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _error_rows(error: DrafterError) -> list[tuple[str, ...]]:
    rows = [(str(e.layer), f"{e.output:.2%}", f"{e.k:.2%}", f"{e.v:.2%}") for e in error.layers]
    return [*rows, ("final norm", f"{error.hidden:.2%}", "", "")]


def _groups(groups: list[PromptGroup]) -> Iterator[tuple[str, ...]]:
    from dflash_trt.runtime.measure.statistics import loss_text

    for group in groups:
        reference = () if group.reference_tau is None else (_mean(group.reference_tau), loss_text(group.tau_loss))
        yield (group.name or "-", str(group.tau.num_prompts if group.tau else 0), _mean(group.tau), *reference)


def _mean(tau: Mean | None) -> str:
    """'3.948 (3.512 to 4.401)'."""
    if tau is None:
        return "-"
    interval = "" if tau.low is None else f" ({tau.low:.3f} to {tau.high:.3f})"
    return f"{tau.mean:.3f}{interval}"
