# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt doctor URL`: what is asked, and what is printed of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.cli.output import print_json, print_table
from dflash_trt.errors import EndpointError, printable
from dflash_trt.progress_display import progress_line

if TYPE_CHECKING:
    from dflash_trt.observe.diagnosis.diagnosis import Diagnosis
    from dflash_trt.observe.diagnosis.judge import EndpointFinding
    from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup

SHOWN_POSITIONS = 16
GRACE_SECONDS = 2.0  # for an answer that ends as the time does


def examine_endpoint(
    url: str, as_json: bool, *, model: str | None, api_key_file: Path | None, baseline: Path | None,
    expect_tau: float | None, long_tokens: int | None, no_load: bool, seconds: float | None,
) -> None:  # fmt: skip
    """Prints the diagnosis; raises EndpointError where something is wrong."""
    from dflash_trt.observe.diagnosis.diagnosis import SECONDS, diagnose, read_baseline
    from dflash_trt.observe.diagnosis.probes import LONG_TOKENS
    from dflash_trt.observe.endpoints.client import Client, read_api_key

    healthy = None if baseline is None else read_baseline(baseline)
    seconds = seconds or SECONDS
    client = Client(url, api_key=read_api_key(api_key_file), deadline_seconds=seconds + GRACE_SECONDS)
    with client, progress_line(f"asking {url}, for at most {seconds:.0f} s"):
        diagnosis = diagnose(
            client, model=model, baseline=healthy, expected_tau=expect_tau, long_tokens=long_tokens or LONG_TOKENS,
            has_load=not no_load, seconds=seconds,
        )  # fmt: skip
    if as_json:
        print_json("doctor-endpoint", msgspec.to_builtins(diagnosis))
    else:
        _print(diagnosis)
    if diagnosis.findings:
        names = "; ".join(finding.name for finding in diagnosis.findings)
        raise EndpointError(f"{diagnosis.url}: {names}", hint="change what stands first, then ask again")


def _print(diagnosis: Diagnosis) -> None:
    version = f" {diagnosis.version}" if diagnosis.version else ""
    title = f"{diagnosis.model} at {diagnosis.url} ({diagnosis.runtime}{version}), {diagnosis.seconds:.0f} s"
    columns = ("probe", "requests", "prompt tokens", "tau of drafting passes", "accepted at position 1, 2, ... in %")
    print_table(title, columns, [_row(group) for group in diagnosis.groups])
    if diagnosis.speeds:
        rows = [
            (
                str(speed.concurrency),
                "the server's choice" if speed.draft_length is None else str(speed.draft_length),
                ", ".join(f"{rate:.0f}" for rate in speed.tokens_per_second),
            )
            for speed in diagnosis.speeds
        ]
        print_table("speed, one figure a round", ("requests at a time", "drafts a step", "tokens/s of all"), rows)
    click.echo(f"acceptance: {printable(diagnosis.acceptance)}")
    if diagnosis.foreign_tokens:
        click.echo(
            f"{diagnosis.foreign_tokens} tokens of other clients are in these figures: ask while nobody else does"
        )
    for finding in diagnosis.notes:
        _print_finding("worth knowing", finding)
    for finding in diagnosis.findings:
        _print_finding("WRONG", finding)
    if not diagnosis.findings:
        click.echo("\nnothing is wrong")


def _row(group: ProbeGroup) -> tuple[str, ...]:
    if not group.samples:
        return group.name, "0", "-", "-", f"not asked: {group.why_not}"
    lengths = [sample.input_tokens for sample in group.samples if sample.input_tokens is not None]
    shares = " ".join(f"{share * 100:.0f}" for share in group.shares_by_position[:SHOWN_POSITIONS])
    remark = f"{shares} ({group.why_not})" if group.why_not else shares
    return (
        group.name,
        str(len(group.samples)),
        f"{min(lengths)} to {max(lengths)}" if lengths else "-",
        "-" if group.tau_of_drafting_passes is None else f"{group.tau_of_drafting_passes:.2f}",
        remark,
    )


def _print_finding(word: str, finding: EndpointFinding) -> None:
    click.echo(f"\n{word}: {finding.name}\n  {printable(finding.figure)}")
    if len(finding.causes) > 1:
        click.echo("  likely causes, in this order:")
    for number, cause in enumerate(finding.causes, 1):
        click.echo(f"  {number}. {cause.what}\n     see     {cause.source}\n     change  {cause.setting}")
