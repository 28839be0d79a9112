# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt doctor URL`: runs the diagnosis and prints it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.cli.output import print_json, print_tables
from dflash_trt.errors import EndpointError, printable
from dflash_trt.runtime.progress_display import progress_line

if TYPE_CHECKING:
    from dflash_trt.observe.diagnosis.diagnosis import Diagnosis

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
        raise EndpointError(f"{diagnosis.url}: {names}", hint="fix the first finding, then ask again")


def _print(diagnosis: Diagnosis) -> None:
    from dflash_trt.observe.diagnosis.diagnosis import finding_lines, tables

    print_tables(tables(diagnosis))
    click.echo(f"acceptance: {printable(diagnosis.acceptance)}")
    if diagnosis.foreign_tokens:
        click.echo(
            f"{diagnosis.foreign_tokens} tokens of other clients are in these figures: ask while no other client does"
        )
    for word, findings in (("worth knowing", diagnosis.notes), ("WRONG", diagnosis.findings)):
        for finding in findings:
            click.echo("\n".join(finding_lines(word, finding)))
    if not diagnosis.findings:
        click.echo("\nnothing is wrong")
