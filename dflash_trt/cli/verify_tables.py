# SPDX-License-Identifier: Apache-2.0
"""What `dflash-trt verify` prints on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_trt.cli.output import print_table

if TYPE_CHECKING:
    from dflash_trt.measure.drafter_error import DrafterError
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
    print_table("acceptance by draft position", ("position", *engines), acceptance_rows(list(engines.values())))
    if report.comparison is not None and report.comparison.error is not None:
        error = report.comparison.error
        title = f"relative error against the reference, mean of {error.num_blocks} blocks"
        print_table(title, ("after layer", "residual stream", "context K", "context V"), _error_rows(error))


def _engine_rows(engines: list[EngineReport]) -> list[tuple[str, ...]]:
    def identical(engine: EngineReport) -> str:
        return f"{sum(p.first_difference is None for p in engine.prompts)} of {len(engine.prompts)}"

    return [
        ("draft", *(engine.source for engine in engines)),
        ("quantised", *map(quantization, engines)),
        ("prompts identical", *map(identical, engines)),
        ("verify passes", *(str(engine.steps) for engine in engines)),
        ("tau", *("-" if engine.tau is None else f"{engine.tau:.3f}" for engine in engines)),
    ]


def quantization(engine: EngineFigures) -> str:
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


def acceptance_rows(engines: Sequence[EngineFigures]) -> list[tuple[str, ...]]:
    """One row a draft position, one column an engine."""

    def cell(share: float | None) -> str:
        return "-" if share is None else f"{share:.1%}"

    by_position = zip(*(engine.acceptance for engine in engines), strict=True)
    return [(str(row[0].position), *(cell(entry.share) for entry in row)) for row in by_position]


def _error_rows(error: DrafterError) -> list[tuple[str, ...]]:
    rows = [(str(e.layer), f"{e.output:.2%}", f"{e.k:.2%}", f"{e.v:.2%}") for e in error.layers]
    return [*rows, ("final norm", f"{error.hidden:.2%}", "", "")]
