# SPDX-License-Identifier: Apache-2.0
"""A short trial: a server is started plain and with DFlash, asked the same, diagnosed, compared and stopped."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from importlib.util import find_spec
from typing import Literal

import msgspec

from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.render import render
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.steps import commands_for_draft
from dflash_trt.errors import ConfigError, MissingDependencyError
from dflash_trt.files.command import command_line
from dflash_trt.observe.bench.local_server import HOST, LocalServer, free_port
from dflash_trt.observe.diagnosis.diagnosis import Diagnosis
from dflash_trt.observe.diagnosis.judge import EndpointFinding
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup, prompts
from dflash_trt.observe.diagnosis.probes import Prober, chats, group
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import identify


def installed_runtimes() -> dict[Runtime, str]:
    """Program by runtime that is installed here."""
    programs: dict[Runtime, str | None] = {"trtllm": shutil.which("trtllm-serve"), "vllm": shutil.which("vllm")}
    found = {runtime: path for runtime, path in programs.items() if path is not None}
    if find_spec("sglang") is not None:
        found["sglang"] = sys.executable
    return found


def chosen_runtime(deployment: ResolvedDeployment, asked: Runtime | None, source: str) -> Runtime:
    """The runtime asked for, or the first that is installed; MissingDependencyError where it is not.

    Raises ConfigError for GPUs of several nodes.
    """
    wanted = deployment.runtimes if asked is None else (asked,)
    steps = command_line(["dflash-trt", "serve-config", source, "--runtime", wanted[0], "-o", "FILE"])
    if deployment.gpus.nodes > 1:
        raise ConfigError(
            f"{deployment.name}: expected GPUs of this node, found {deployment.gpus}",
            hint=f"start it on each node, then ask doctor: {steps}",
        )
    if (runtime := next((each for each in wanted if each in installed_runtimes()), None)) is not None:
        return runtime
    raise MissingDependencyError(
        f"{deployment.name}: expected {' or '.join(wanted)} to be installed here, found none",
        hint=f"install one, or use its container: {steps}",
    )


def deployment_server(deployment: ResolvedDeployment, runtime: Runtime, method: Method, source: str) -> LocalServer:
    """The installed runtime with the configuration that `serve-config` writes.

    Raises ConfigError for a draft that has yet to be converted or built.
    """
    port = free_port()
    rendered = render(deployment, runtime, method, host=HOST, port=port)
    if commands := commands_for_draft(deployment, source, runtime, method):
        raise ConfigError(f"{deployment.name}: expected the draft here, found none", hint=commands[0])
    words = rendered.words("{}")
    program = installed_runtimes()[runtime]
    words = [program if word in ("trtllm-serve", "vllm") else word for word in words]
    if words[0] == "python":
        words[0] = sys.executable
    file = rendered.text if runtime == "trtllm" else None
    return LocalServer(words=words, port=port, file=file)


MAX_TOKENS = 128
NUM_PROMPTS = 8
BAR = 40
Outcome = Literal["works and is faster", "works, but is not faster"]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to one set of prompts, plain and with DFlash."""

    plain: ProbeGroup
    dflash: ProbeGroup
    diagnosis: Diagnosis

    @property
    def ratio(self) -> float:
        """Speed with DFlash, in that of plain decoding."""
        return tokens_per_second(self.dflash) / tokens_per_second(self.plain)

    @property
    def num_equal(self) -> int:
        """Answers that are the same text."""
        plain = {sample.prompt: sample.text for sample in self.plain.samples}
        return sum(plain.get(sample.prompt) == sample.text for sample in self.dflash.samples)

    @property
    def found_by_doctor(self) -> list[EndpointFinding]:
        """What is wrong, and what could not be measured."""
        return [*self.diagnosis.findings, *self.diagnosis.unmeasured]

    @property
    def outcome(self) -> Outcome:
        """What the two speeds say; `diagnosis` says what is wrong beside it."""
        return "works and is faster" if self.ratio > 1 else "works, but is not faster"


def ask(url: str, seconds: float) -> ProbeGroup:
    """NUM_PROMPTS greedy answers after one that warms the server up; raises EndpointError without answers."""
    with Client(url, deadline_seconds=seconds) as client:
        runtime = identify(client)
        prober = Prober(client, runtime, is_chat=chats(client, runtime), seconds=seconds)
        chosen = list(prompts().short.items())[:NUM_PROMPTS]
        prober.ask("warm-up", chosen[-1][1], max_tokens=MAX_TOKENS)
        return group(
            "comparison", [partial(prober.ask, name, prompt, max_tokens=MAX_TOKENS) for name, prompt in chosen]
        )


def tokens_per_second(answers: ProbeGroup) -> float:
    """Output tokens by the seconds from request to end, all answers together; 0 without answers."""
    seconds = sum(sample.seconds for sample in answers.samples)
    return sum(sample.output_tokens for sample in answers.samples) / seconds if seconds else 0.0


def picture(comparison: Comparison) -> str:
    """Two bars."""
    rates = {"plain": tokens_per_second(comparison.plain), "DFlash": tokens_per_second(comparison.dflash)}
    widest = max(rates.values())
    bars = {name: "█" * max(1, round(BAR * rate / widest)) for name, rate in rates.items()}
    return "\n".join(f"{name:<7} {bars[name]:<{BAR}} {rate:.0f} tokens/s" for name, rate in rates.items())


def verdict(comparison: Comparison, name: str) -> str:
    """One line."""
    tau = comparison.dflash.tau_of_drafting_passes
    count = len(comparison.dflash.samples)
    parts = [
        f"{comparison.ratio:.2f}x the speed of plain decoding, {count} questions one at a time",
        "tau of drafting passes not published" if tau is None else f"tau of drafting passes {tau:.2f}",
        f"{comparison.num_equal} of {count} answers equal",
        f"doctor finds {'; '.join(each.name for each in comparison.found_by_doctor) or 'nothing wrong'}",
    ]
    return f"{name} {comparison.outcome}: {'; '.join(parts)}"
