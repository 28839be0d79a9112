# SPDX-License-Identifier: Apache-2.0
"""`verify --features`: acceptance on captured answers, without the target."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.cli.output import print_json, print_table
from dflash_trt.cli.verify_tables import acceptance_rows, quantization
from dflash_trt.drafter.open import open_drafter
from dflash_trt.engine.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    from dflash_trt.measure.replay import Replayed
    from dflash_trt.measure.replay_report import ExpectedReport, Part, ReplayReport
    from dflash_trt.measure.statistics import Mean, TauLoss
    from dflash_trt.quantize.features import FeatureFile


def verify_features(
    engine: Path,
    features: Path,
    reference: Path | None,
    max_tau_loss: float | None,
    temperature: float | None,
    *,
    as_json: bool,
) -> None:
    """Walks the captured answers with the engine and its reference; VerificationError where too much of tau is lost.

    With a `temperature` it also says what sampling is expected to accept.
    """
    from dflash_trt.measure.comparable import check_features, check_reference
    from dflash_trt.measure.replay_report import expected_report, replay_report
    from dflash_trt.measure.verification_report import find_loss
    from dflash_trt.quantize.features import open_features

    manifest, other = read_manifest(engine), None if reference is None else read_manifest(reference)
    if other is not None:
        check_reference(manifest, other, str(reference))
    with open_features(features, manifest.draft) as file:
        check_features(manifest, file.facts, str(features), str(engine))
        if temperature is not None:
            file.check_logprobs(temperature)
        with progress(file.facts.num_sequences * (1 if other is None else 2), "prompts") as advance:
            replays = _replay(engine, manifest, file, advance)
            beside = None if other is None or reference is None else (other, _replay(reference, other, file, advance))
        expected = None
        if temperature is not None:
            num_drafts, others = manifest.draft.num_draft_tokens, None if beside is None else beside[1]
            expected = expected_report(file, temperature, num_drafts, replays, others)
        report = replay_report(file.facts, manifest, replays, beside, expected)
    loss = None if report.comparison is None else report.comparison.tau_loss
    failure = None if max_tau_loss is None else find_loss(loss, max_tau_loss)
    if as_json:
        print_json(
            "verify",
            {"passed": failure is None, "max_tau_loss": max_tau_loss, **msgspec.structs.asdict(report)},
        )
    else:
        _print(report)
    _warn(report)
    if failure is not None:
        raise failure


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, with the time left, and what moves it on by one."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _replay(engine: Path, manifest: Manifest, file: FeatureFile, advance: Callable[[], None]) -> list[Replayed]:
    from dflash_trt.measure.replay import BATCH_SIZE, replay

    return replay(file, open_drafter(engine, manifest, num_slots=BATCH_SIZE), on_prompt=advance)


def _warn(report: ReplayReport) -> None:
    from dflash_trt.measure.statistics import MIN_PROMPTS

    if (count := len(report.engine.prompts)) < MIN_PROMPTS:
        click.echo(f"warning: an interval means little below {MIN_PROMPTS} prompts, found {count}", err=True)


def _print(report: ReplayReport) -> None:
    engines = {"engine": report.engine}
    if report.reference is not None:
        engines["reference"] = report.reference
    listed = list(engines.values())
    rows = [
        ("draft", *(engine.source for engine in listed)),
        ("quantised", *map(quantization, listed)),
        ("verify passes", *(str(engine.steps) for engine in listed)),
        ("tau", *(_mean(engine.tau_interval) for engine in listed)),
    ]
    if report.comparison is not None:
        rows.append(("tau loss", _loss(report.comparison.tau_loss), ""))
    text = f" sampled at temperature {report.text_temperature:g}" if report.text_temperature else ""
    print_table(f"{len(report.engine.prompts)} captured answers{text}, replayed", ("", *engines), rows)
    print_table("acceptance by draft position", ("position", *engines), acceptance_rows(listed))
    for title, parts in (("by category", report.by_category), ("by language", report.by_language)):
        if parts:
            print_table(title, ("", "prompts", *engines, *(["tau loss"] if len(engines) > 1 else [])), _parts(parts))
    if report.expected is not None:
        _print_expected(report, report.expected)


def _print_expected(report: ReplayReport, expected: ExpectedReport) -> None:
    """What sampling at the temperature is expected to accept; two bounds in a cell where they differ as printed."""
    T, text = expected.engine.temperature, report.text_temperature
    listed = [expected.engine, *([] if expected.reference is None else [expected.reference])]
    engines = ["engine", "reference"][: len(listed)]
    rows = [("tau", *(_span(*map(_mean, (e.tau.low, e.tau.high))) if e.tau else "-" for e in listed))]
    if (loss := expected.tau_loss) is not None:
        rows.append(("tau loss", _span(_loss(loss.low), _loss(loss.high)), ""))
    for positions in zip(*(engine.acceptance for engine in listed), strict=True):
        cells = ("-" if p.low is None or p.high is None else _span(f"{p.low:.1%}", f"{p.high:.1%}") for p in positions)
        rows.append((f"position {positions[0].position}", *cells))
    behind = "" if text == T else f", behind text of temperature {text:g}"
    print_table(f"expected when sampling at temperature {T:g}{behind}", ("", *engines), rows)


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} .. {high}"


def _parts(parts: list[Part]) -> Iterator[tuple[str, ...]]:
    for part in parts:
        beside = () if part.reference_tau is None else (_mean(part.reference_tau), _loss(part.tau_loss))
        yield (part.name or "-", str(part.tau.num_prompts if part.tau else 0), _mean(part.tau), *beside)


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
