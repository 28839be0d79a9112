# SPDX-License-Identifier: Apache-2.0
"""What `dflash-trt verify` prints on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_trt.cli.output import print_table

if TYPE_CHECKING:
    from dflash_trt.measure.drafter_error import DrafterError
    from dflash_trt.measure.replay_report import Part, ReplayReport
    from dflash_trt.measure.statistics import Mean, TauLoss
    from dflash_trt.measure.verification_report import Comparison, EngineFigures, EngineReport, VerificationReport


def print_report(report: VerificationReport) -> None:
    """Prints one table each for the verdict, acceptance by position and error by layer."""
    engines = {"engine": report.engine}
    if report.reference is not None:
        engines["reference"] = report.reference
    lossless = all(engine.identical for engine in engines.values())
    title = "identical to plain greedy decoding" if lossless else "TOKENS DIFFER from plain greedy decoding"
    rows = [*_engine_rows(list(engines.values())), ("target in", *[report.target_dtype] * len(engines))]
    if report.comparison is not None:
        rows += _loss_rows(report.comparison)
    print_table(title, ("", *engines), rows)
    print_table("acceptance by draft position", ("position", *engines), _acceptance_rows(list(engines.values())))
    if report.comparison is not None and report.comparison.error is not None:
        error = report.comparison.error
        title = f"relative error against the reference, mean of {error.num_blocks} blocks"
        print_table(title, ("after layer", "residual stream", "context K", "context V"), _error_rows(error))


def print_replay_report(report: ReplayReport) -> None:
    """For --features: tables of tau, acceptance by position, and tau by category and language."""
    engines = {"engine": report.engine}
    if report.reference is not None:
        engines["reference"] = report.reference
    listed = list(engines.values())
    rows = [
        ("draft", *(engine.source for engine in listed)),
        ("quantised", *map(_quantization, listed)),
        ("verify passes", *(str(engine.steps) for engine in listed)),
        ("tau", *(_mean(engine.tau_interval) for engine in listed)),
    ]
    if report.comparison is not None:
        rows.append(("tau loss", _loss(report.comparison.tau_loss), ""))
    text = f" sampled at temperature {report.text_temperature:g}" if report.text_temperature else ""
    print_table(f"{len(report.engine.prompts)} captured answers{text}, replayed", ("", *engines), rows)
    print_table("acceptance by draft position", ("position", *engines), _acceptance_rows(listed))
    for title, parts in (("by category", report.by_category), ("by language", report.by_language)):
        if parts:
            print_table(title, ("", "prompts", *engines, *(["tau loss"] if len(engines) > 1 else [])), _parts(parts))


def _engine_rows(engines: list[EngineReport]) -> list[tuple[str, ...]]:
    def identical(engine: EngineReport) -> str:
        return f"{sum(p.first_difference is None for p in engine.prompts)} of {len(engine.prompts)}"

    return [
        ("draft", *(engine.source for engine in engines)),
        ("quantised", *map(_quantization, engines)),
        ("prompts identical", *map(identical, engines)),
        ("verify passes", *(str(engine.steps) for engine in engines)),
        ("tau", *("-" if engine.tau is None else f"{engine.tau:.3f}" for engine in engines)),
    ]


def _quantization(engine: EngineFigures) -> str:
    """'12 modules NVFP4, FP8 context cache'."""
    parts = [f"{count} modules {algorithm}" for algorithm, count in engine.quantized_modules.items()]
    return ", ".join([*parts, *(["FP8 context cache"] if engine.fp8_kv_cache else [])]) or "no"


def _loss_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    loss = comparison.tau_loss
    if loss is None:
        return [("tau loss", "-")]
    rows: list[tuple[str, ...]] = [("tau loss", f"{loss.loss:.2%}")]
    if loss.low is not None and loss.high is not None:
        rows.append((f"{loss.confidence:.0%} interval", f"{loss.low:.2%} to {loss.high:.2%}"))
    worst = min(comparison.tau_differences, key=lambda prompt: prompt.difference)
    rows.append(("worst prompt", f"{worst.difference:+.3f} ({worst.name})"))
    return rows


def _acceptance_rows(engines: Sequence[EngineFigures]) -> list[tuple[str, ...]]:
    """One row a draft position, one column an engine."""

    def cell(share: float | None) -> str:
        return "-" if share is None else f"{share:.1%}"

    by_position = zip(*(engine.acceptance for engine in engines), strict=True)
    return [(str(row[0].position), *(cell(entry.share) for entry in row)) for row in by_position]


def _error_rows(error: DrafterError) -> list[tuple[str, ...]]:
    rows = [(str(e.layer), f"{e.output:.2%}", f"{e.k:.2%}", f"{e.v:.2%}") for e in error.layers]
    return [*rows, ("final norm", f"{error.hidden:.2%}", "", "")]


def _parts(parts: list[Part]) -> Iterator[tuple[str, ...]]:
    for part in parts:
        reference = () if part.reference_tau is None else (_mean(part.reference_tau), _loss(part.tau_loss))
        yield (part.name or "-", str(part.tau.num_prompts if part.tau else 0), _mean(part.tau), *reference)


def _mean(tau: Mean | None) -> str:
    """'3.948 (3.512 to 4.401)'."""
    if tau is None:
        return "-"
    interval = "" if tau.low is None else f" ({tau.low:.3f} to {tau.high:.3f})"
    return f"{tau.mean:.3f}{interval}"


def _loss(loss: TauLoss | None) -> str:
    """'5.61% (3.80% to 7.32%)'."""
    if loss is None:
        return "-"
    interval = "" if loss.low is None else f" ({loss.low:.2%} to {loss.high:.2%})"
    return f"{loss.loss:.2%}{interval}"
