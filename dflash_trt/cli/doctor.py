# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt doctor`: this machine, its ranks, or a running server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dflash_trt.cli.completion import ENGINE_OR_URL
from dflash_trt.cli.config_file import config_option
from dflash_trt.cli.options import MAX_SECONDS, PATH, FiniteRange, json_option, refuse_given
from dflash_trt.cli.output import print_json, print_table, print_tables
from dflash_trt.errors import EndpointError, printable
from dflash_trt.runtime.progress_display import progress_line

if TYPE_CHECKING:
    from dflash_trt.cli.doctor_machine import MachineFinding
    from dflash_trt.observe.diagnosis.diagnosis import Diagnosis


class DurationType(click.ParamType):  # type: ignore[type-arg]  # generic as of click 8.4
    """A Prometheus duration with one unit."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text itself, if Prometheus takes it."""
        if re.fullmatch(r"[1-9][0-9]{0,5}[smhdw]", str(value)) is None:
            self.fail(f"{value!r} is no duration such as 30m, 6h or 1d", param, ctx)
        return str(value)


ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}(?:/\S*)?", re.ASCII)
DURATION = DurationType()
OF_PROMETHEUS = ("match", "window_length", "against")
OF_PROMPTS = frozenset(("long_tokens", "no_load"))
GRACE_SECONDS = 2.0  # for an answer that ends as the time does


def examine_endpoint(
    url: str, as_json: bool, *, model: str | None, api_key_file: Path | None, baseline: Path | None,
    expect_tau: float | None, long_tokens: int | None, no_load: bool, seconds: float | None,
) -> None:  # fmt: skip
    """Prints the diagnosis; raises EndpointError where something is wrong, or could not be measured."""
    from dflash_trt.observe.diagnosis.diagnosis import SECONDS, diagnose, read_baseline
    from dflash_trt.observe.endpoints.client import Client, read_api_key

    healthy = None if baseline is None else read_baseline(baseline)
    seconds = seconds or SECONDS
    client = Client(url, api_key=read_api_key(api_key_file), deadline_seconds=seconds + GRACE_SECONDS)
    with client, progress_line(f"asking {url}, for at most {seconds:.0f} s"):
        diagnosis = diagnose(
            client, model=model, baseline=healthy, expected_tau=expect_tau, long_tokens=long_tokens,
            has_load=not no_load, seconds=seconds,
        )  # fmt: skip
    if as_json:
        print_json("doctor-endpoint", msgspec.to_builtins(diagnosis))
    else:
        print_diagnosis(diagnosis)
    if found := [*diagnosis.findings, *diagnosis.unmeasured]:
        names = "; ".join(finding.name for finding in found)
        raise EndpointError(f"{diagnosis.url}: {names}", hint="fix the first finding, then ask again")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Tables of the probes and checks, then every finding."""
    from dflash_trt.observe.diagnosis.diagnosis_tables import checks_table, conclusion, findings_lines, tables

    print_tables([*tables(diagnosis), checks_table(diagnosis.checks)])
    click.echo(f"acceptance: {printable(diagnosis.acceptance)}")
    if diagnosis.foreign_tokens:
        click.echo(
            f"{diagnosis.foreign_tokens} tokens of other clients are in these figures: ask while no other client does"
        )
    for line in findings_lines(diagnosis.notes, diagnosis.unmeasured, diagnosis.findings):
        click.echo(line)
    click.echo(f"\n{conclusion(diagnosis.checks, diagnosis.findings)}")


PIP = re.compile(r"pip install 'dflash-trt\[(\w+)\]'")


@click.command(short_help="Show what this machine has, or what is wrong with a running server.")
@click.argument("subject", type=ENGINE_OR_URL, required=False, metavar="[URL|ENGINE]")
@click.option("--ranks", is_flag=True, help="Under mpiexec: compare what all ranks see, and ENGINE where given.")
@click.option("--model", metavar="NAME", help="With URL: the model to ask, where it serves several.")
@click.option("--api-key-file", type=PATH, help="With URL: a file with the server's API key.")
@click.option("--baseline", type=PATH, help="With URL: the --json of a healthy server.")
@click.option("--expect-tau", type=FiniteRange(min=1), help="With URL: expected acceptance length (tau).")
@click.option(
    "--long-tokens", type=click.IntRange(min=512), help="With URL: length of long prompts.  [default: at most 6000]"
)
@click.option("--no-load", is_flag=True, help="With URL: never ask more than one request at a time.")
@click.option(
    "--seconds", type=FiniteRange(1, MAX_SECONDS), help="With URL: stop after this long.  [default: 110; --passive: 60]"
)
@click.option("--passive", is_flag=True, help="With URL: send no prompts; read its counters twice.")
@click.option("--prometheus", metavar="URL", help="Judge what this Prometheus has of a server, without prompts.")
@click.option("--match", default="", metavar="LABELS", help="With --prometheus: the servers, as 'job=\"NAME\"'.")
@click.option("--window", "window_length", type=DURATION, help="With --prometheus: the traffic judged.  [default: 1h]")
@click.option(
    "--against", type=DURATION, help="With --prometheus: compare with the traffic this long before.  [default: 1d]"
)
@config_option
@json_option
def doctor(
    subject: str | None, ranks: bool, as_json: bool, passive: bool, prometheus: str | None, **options: Any
) -> None:
    """Show what this machine has, what is missing for which command, and the command that fixes it.

    With URL: ask a running server (this one, vLLM, SGLang, TensorRT-LLM) for at most two minutes, and say what is wrong
    with its speculative decoding, why, and what to change. Exits with 1 if anything is wrong. --passive and
    --prometheus send no prompts: they judge the traffic that users make.

    \b
    Example:
      dflash-trt doctor
      dflash-trt doctor localhost:8000
      dflash-trt doctor http://localhost:8000 --json > healthy.json
      dflash-trt doctor http://localhost:8000 --baseline healthy.json
      dflash-trt doctor http://localhost:8000 --passive --expect-tau 4.2
      dflash-trt doctor --prometheus http://localhost:9090 --match 'job="vllm"' --window 6h --against 1w
      mpiexec -n 8 dflash-trt doctor --ranks engine
    """
    of_prometheus = {name: options.pop(name) for name in OF_PROMETHEUS}
    if prometheus is not None:
        from dflash_trt.cli.doctor_passive import watch_prometheus

        if subject is not None:
            raise click.UsageError("--prometheus asks Prometheus alone: leave out URL, or choose a server with --match")
        shared = {name: options.pop(name) for name in ("model", "api_key_file", "expect_tau")}
        refuse_given([*options, "passive", "ranks"], "is for a URL")
        watch_prometheus(prometheus, as_json, **shared, **of_prometheus)
        return
    refuse_given(of_prometheus, "is for --prometheus URL")
    if subject is not None and not ranks and ADDRESS.fullmatch(subject):
        subject = f"http://{subject}"
    if subject is not None and "://" in subject and not ranks:
        if passive:
            from dflash_trt.cli.doctor_passive import watch_endpoint

            refuse_given(OF_PROMPTS, "is for the prompts that --passive does not send")
            watch_endpoint(subject, as_json, **{name: options[name] for name in options.keys() - OF_PROMPTS})
        else:
            examine_endpoint(subject, as_json, **options)
        return
    refuse_given([*options, "passive"], "is for a URL, as http://localhost:8000")
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
