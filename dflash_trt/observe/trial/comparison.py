# SPDX-License-Identifier: Apache-2.0
"""Asks a server the same questions without and with DFlash, and compares the answers."""

from __future__ import annotations

from functools import partial
from typing import Literal

import msgspec

from dflash_trt.observe.diagnosis.causes import EndpointFinding
from dflash_trt.observe.diagnosis.diagnosis import Diagnosis
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup, prompts
from dflash_trt.observe.diagnosis.probe_groups import group
from dflash_trt.observe.diagnosis.prober import Prober, chats
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import identify

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
        """Speed with DFlash over the speed of plain decoding."""
        return tokens_per_second(self.dflash) / tokens_per_second(self.plain)

    @property
    def num_equal(self) -> int:
        """Prompts whose two answers have the same text."""
        plain = {sample.prompt: sample.text for sample in self.plain.samples}
        return sum(plain.get(sample.prompt) == sample.text for sample in self.dflash.samples)

    @property
    def found_by_doctor(self) -> list[EndpointFinding]:
        """Faults, and what could not be measured."""
        return [*self.diagnosis.findings, *self.diagnosis.unmeasured]

    @property
    def outcome(self) -> Outcome:
        """Verdict of the two speeds alone; faults are in `diagnosis`."""
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
    """One bar for each method, as text."""
    rates = {"plain": tokens_per_second(comparison.plain), "DFlash": tokens_per_second(comparison.dflash)}
    widest = max(rates.values())
    bars = {name: "█" * max(1, round(BAR * rate / widest)) for name, rate in rates.items()}
    return "\n".join(f"{name:<7} {bars[name]:<{BAR}} {rate:.0f} tokens/s" for name, rate in rates.items())


def verdict(comparison: Comparison, name: str) -> str:
    """The result in one line."""
    tau = comparison.dflash.tau_of_drafting_passes
    count = len(comparison.dflash.samples)
    parts = [
        f"{comparison.ratio:.2f}x the speed of plain decoding, {count} questions one at a time",
        "tau of drafting passes not published" if tau is None else f"tau of drafting passes {tau:.2f}",
        f"{comparison.num_equal} of {count} answers equal",
        f"doctor finds {'; '.join(each.name for each in comparison.found_by_doctor) or 'nothing wrong'}",
    ]
    return f"{name} {comparison.outcome}: {'; '.join(parts)}"
