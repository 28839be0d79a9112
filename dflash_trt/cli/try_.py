# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt try`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.cli.completion import DEPLOYMENT, DRAFT, TARGET
from dflash_trt.cli.deployment_source import read_deployment
from dflash_trt.cli.doctor import print_diagnosis
from dflash_trt.cli.options import MAX_SECONDS, FiniteRange, json_option
from dflash_trt.cli.output import print_json
from dflash_trt.deploy.catalog import next_commands
from dflash_trt.deploy.deployment_file import METHODS, Method, deployment_path
from dflash_trt.deploy.schema import PACKAGES, Runtime
from dflash_trt.errors import ConfigError, EndpointError, printable
from dflash_trt.runtime.progress_display import LINE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflash_trt.observe.diagnosis.diagnosis import Diagnosis
    from dflash_trt.observe.servers.local_server import LocalServer, RunningServer, Waiting
    from dflash_trt.observe.trial.comparison import Comparison

THREADS = "OMP_NUM_THREADS"
NAMES: dict[Method, str] = {
    "none": "the plain server", "dflash": "the server with DFlash", "eagle3": "the server with EAGLE-3",
    "mtp": "the server with MTP", "ngram": "the server with n-grams",
}  # fmt: skip


@click.command("try", short_help="Serve a deployment or engine here with and without DFlash, and compare the speed.")
@click.argument("source", type=DEPLOYMENT, metavar="DEPLOYMENT|ENGINE")
@click.option(
    "--runtime", type=click.Choice(list(PACKAGES)), help="Of a deployment. Default: the first that is installed here."
)
@click.option("--target", type=TARGET, help="Target, in place of what DEPLOYMENT or ENGINE names.")
@click.option("--draft", type=DRAFT, help="Draft, in place of what DEPLOYMENT names.")
@click.option("--against", type=click.Choice([each for each in METHODS if each != "dflash"]), default="none",
              show_default=True, help="What DFlash is compared with; for a deployment.")  # fmt: skip
@click.option("--seconds", type=FiniteRange(10, MAX_SECONDS), default=110.0, show_default=True,
              help="Time for the questions, and for doctor's.")  # fmt: skip
@json_option
def try_(
    source: str, runtime: Runtime | None, target: str | None, draft: str | None, against: Method, seconds: float,
    as_json: bool,
) -> None:  # fmt: skip
    """Start servers with and without DFlash, compare their speed, run doctor, and stop everything.

    ENGINE runs in `dflash-trt serve`, with and without DFlash at once: both answer each question in turns until the
    95 % interval of the speed-up is narrower than 10 %, on one CPU thread unless OMP_NUM_THREADS says otherwise.
    DEPLOYMENT runs in trtllm-serve, vLLM or SGLang, one server after the other (not yet run on a GPU). The exit code
    is 1 where doctor finds something wrong. Every process ends, even if this one is killed.

    \b
    Example:
      dflash-trt try demo
      dflash-trt try gpt-oss-20b.h100x1.latency --runtime vllm
    """
    from dflash_trt.observe.trial.comparison import picture, verdict

    server_of = _servers(source, runtime, target, draft, against)
    comparison = _compare(server_of, against, seconds, is_in_turns=deployment_path(source) is None)
    line = verdict(comparison, Path(source).name)
    if as_json:
        speed = msgspec.structs.asdict(comparison.speed)
        document = msgspec.to_builtins(comparison) | {"speed": speed, "verdict": comparison.speed.outcome}
        print_json("try", document)
    else:
        print_diagnosis(comparison.diagnosis)
        click.echo("\n".join(("", *filter(None, [picture(comparison)]), printable(line))))
    if findings := comparison.found_by_doctor:
        raise EndpointError(f"{source}: {findings[0].name}", hint="change what doctor says, then try again")


def _servers(
    source: str, runtime: Runtime | None, target: str | None, draft: str | None, against: Method
) -> Callable[[Method], LocalServer]:
    """How each method's server is started."""
    from dflash_trt.observe.servers.local_server import engine_server, engine_words
    from dflash_trt.observe.trial.installed_server import chosen_runtime, deployment_server

    if deployment_path(source) is not None:
        deployment = read_deployment(source, target, draft, None, None)
        chosen = chosen_runtime(deployment, runtime, source)
        return lambda method: deployment_server(deployment, chosen, method, source)
    if runtime is not None or draft is not None or against != "none":
        raise click.UsageError("--runtime, --draft and --against are for a deployment; an engine is served here")
    if not Path(source).is_dir():
        raise ConfigError(
            f"{source} is neither an engine directory nor a deployment",
            hint=next_commands(source)
            or "`make demo` builds the engine `demo`; dflash-trt serve-config --list shows deployments",
        )
    lengths = {"none": "0", "dflash": None}
    threads = {THREADS: os.environ.get(THREADS, "1")}
    return lambda method: engine_server(
        engine_words(Path(source), target=target, draft_length=lengths[method]), threads
    )  # fmt: skip


def _compare(
    server_of: Callable[[Method], LocalServer], against: Method, seconds: float, *, is_in_turns: bool
) -> Comparison:
    """Servers of an engine run at once and take turns; a GPU's memory holds one server of a deployment at a time."""
    from dflash_trt.api.paired_speed import Pair
    from dflash_trt.observe.endpoints.client import Client
    from dflash_trt.observe.trial.comparison import Comparison
    from dflash_trt.observe.trial.questions import AskedServer, ask_alone, ask_in_turns

    # Missing requirements are reported before anything starts.
    servers = {method: server_of(method) for method in (against, "dflash")}
    with ExitStack() as stack:
        with ExitStack() as plain_only:
            running = plain_only.enter_context(_running(servers[against], against))
            plain = AskedServer(plain_only.enter_context(Client(running.url)), running, seconds)
            if is_in_turns:
                drafting = stack.enter_context(_running(servers["dflash"], "dflash"))
                dflash = AskedServer(stack.enter_context(Client(drafting.url)), drafting, seconds)
                _say("asking both in turns")
                pairs = ask_in_turns(plain, dflash, seconds)
            else:
                _say(f"asking {NAMES[against]}")
                timings = ask_alone(plain, seconds / 2)
        if not is_in_turns:
            drafting = stack.enter_context(_running(servers["dflash"], "dflash"))
            dflash = AskedServer(stack.enter_context(Client(drafting.url)), drafting, seconds)
            _say(f"asking {NAMES['dflash']}")
            pairs = [Pair(*each) for each in zip(timings, ask_alone(dflash, 0, len(timings)), strict=True)]
        diagnosis = _diagnose(drafting.url, seconds)
    return Comparison(
        pairs=pairs, against=against, plain=plain.group, dflash=dflash.group, is_in_turns=is_in_turns,
        diagnosis=diagnosis,
    )  # fmt: skip


def _diagnose(url: str, seconds: float) -> Diagnosis:
    from dflash_trt.observe.diagnosis.diagnosis import diagnose
    from dflash_trt.observe.endpoints.client import Client
    from dflash_trt.observe.trial.questions import ANSWER_SECONDS

    _say("asking doctor")
    with Client(url, deadline_seconds=seconds + ANSWER_SECONDS) as client:
        return diagnose(client, seconds=seconds)


@contextmanager
def _running(server: LocalServer, method: Method) -> Iterator[RunningServer]:
    name = NAMES[method]
    _say(f"starting {name}")
    began = time.monotonic()
    with _progress(name) as waiting, server.running(waiting) as running:
        _say(f"{name} answers after {time.monotonic() - began:.0f} s")
        yield running
    _say(f"{name} is stopped")


@contextmanager
def _progress(name: str) -> Iterator[Waiting]:
    """A line that stays where stderr is a terminal, else one now and then, with the server's last words."""
    if not sys.stderr.isatty():
        yield partial(_line, name, [0.0])
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(f"loading {name}") as status:
        yield lambda seconds, last: status.update(f"loading {name}, {seconds:.0f} s: {escape(printable(last))[:80]}")


def _line(name: str, said: list[float], seconds: float, last: str) -> None:
    if seconds - said[0] >= LINE_SECONDS:
        said[0] = seconds
        _say(f"loading {name}, {seconds:.0f} s: {printable(last)[:80]}")


def _say(text: str) -> None:
    click.echo(text, err=True)
