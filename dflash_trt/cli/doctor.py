# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt doctor`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.completion import ENGINE_OR_URL
from dflash_trt.cli.doctor_endpoint import examine_endpoint
from dflash_trt.cli.options import PATH, json_option, refuse_given
from dflash_trt.cli.output import print_json, print_table

if TYPE_CHECKING:
    from dflash_trt.cli.doctor_machine import MachineFinding

PIP = re.compile(r"pip install 'dflash-trt\[(\w+)\]'")


@click.command(short_help="Show what this machine has, or what is wrong with a running server.")
@click.argument("subject", type=ENGINE_OR_URL, required=False, metavar="[URL|ENGINE]")
@click.option("--ranks", is_flag=True, help="Under mpiexec: compare what all ranks see, and ENGINE where given.")
@click.option("--model", help="With URL: the model to ask, where it serves several.")
@click.option("--api-key-file", type=PATH, help="With URL: a file with the server's API key.")
@click.option("--baseline", type=PATH, help="With URL: the --json of a healthy server.")
@click.option("--expect-tau", type=click.FloatRange(min=1), help="With URL: expected tau of drafting passes.")
@click.option("--long-tokens", type=click.IntRange(min=512), help="With URL: length of long prompts.  [default: 6000]")
@click.option("--no-load", is_flag=True, help="With URL: never ask more than one request at a time.")
@click.option("--seconds", type=click.FloatRange(min=1), help="With URL: stop asking after this long.  [default: 110]")
@json_option
def doctor(subject: str | None, ranks: bool, as_json: bool, **options: Any) -> None:
    """Show what this machine has, what is missing for which command, and the command that fixes it.

    With URL: ask a running server (this one, vLLM, SGLang, TensorRT-LLM) for at most two minutes, and say what is wrong
    with its speculative decoding, why, and what to change. Exits with 1 if anything is wrong.

    \b
    Example:
      dflash-trt doctor
      dflash-trt doctor http://localhost:8000
      dflash-trt doctor http://localhost:8000 --json > healthy.json
      dflash-trt doctor http://localhost:8000 --baseline healthy.json
      mpiexec -n 8 dflash-trt doctor --ranks engine
    """
    if subject is not None and "://" in subject and not ranks:
        examine_endpoint(subject, as_json, **options)
        return
    refuse_given(options, "is for a URL, as http://localhost:8000")
    if subject is not None and not ranks:
        raise click.UsageError(
            "expected a URL as http://localhost:8000; ENGINE is for --ranks, and dflash-trt inspect ENGINE looks at one"
        )
    if ranks:
        from dflash_trt.cli.doctor_ranks import compare_ranks

        compare_ranks(None if subject is None else Path(subject), as_json=as_json)
        return
    from dflash_trt.cli.doctor_machine import examine

    findings = examine()
    if as_json:
        print_json("doctor", {"findings": findings})
        return
    print_table("this machine", ("what", "found", "needed for"), map(_row, findings))
    # A command below the table is one line that can be copied.
    missing = [finding for finding in findings if not finding.found and finding.fix]
    if missing:
        click.echo("\nto fix what is missing:")
    extras = {match[1] for finding in missing if (match := PIP.fullmatch(finding.fix or ""))}
    if extras:
        click.echo(f"  pip install 'dflash-trt[{','.join(sorted(extras))}]'")
    for finding in missing:
        if PIP.fullmatch(finding.fix or "") is None:
            click.echo(f"  {finding.name.partition(' (')[0]}: {finding.fix}")


def _row(finding: MachineFinding) -> tuple[str, str, str]:
    name, _, reason = finding.name.partition(" (")
    nothing = f"nothing: {reason.removesuffix(')')}" if reason else "nothing"
    return name, finding.found or nothing, ", ".join(finding.needed_for)
