# SPDX-License-Identifier: Apache-2.0
"""Compares the answers of a server with DFlash, and without or with other speculation."""

from __future__ import annotations

from functools import reduce
from operator import add

import msgspec

from dflash_trt.api.paired_speed import Pair, PairedSpeed, Timing, paired_speed
from dflash_trt.observe.diagnosis.checks import EndpointFinding
from dflash_trt.observe.diagnosis.diagnosis import Diagnosis
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.plots.method_styles import TITLES

BAR = 40


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to one list of questions, plain and with DFlash: answer i of both makes pair i."""

    against: str = "none"
    """Method in the place of plain decoding."""

    pairs: list[Pair]
    plain: ProbeGroup
    dflash: ProbeGroup
    is_in_turns: bool
    """Whether both servers ran at once and took turns; otherwise one ran after the other."""
    diagnosis: Diagnosis

    @property
    def speed(self) -> PairedSpeed:
        if self.against == "none":
            return paired_speed(self.pairs, self.dflash.tau_of_drafting_passes)
        # Other speculation may be slower than plain decoding, so the acceptance length is no bound.
        return paired_speed(self.pairs, None, other=TITLES[self.against])

    @property
    def num_equal(self) -> int:
        """Questions whose two answers have the same text."""
        return sum(a.text == b.text for a, b in zip(self.plain.samples, self.dflash.samples, strict=True))

    @property
    def found_by_doctor(self) -> list[EndpointFinding]:
        """Faults, and what could not be measured."""
        return [*self.diagnosis.findings, *self.diagnosis.unmeasured]

    @property
    def totals(self) -> dict[str, Timing]:
        """All answers of each way of decoding."""
        return {
            TITLES[self.against]: reduce(add, (pair.plain for pair in self.pairs)),
            "DFlash": reduce(add, (pair.dflash for pair in self.pairs)),
        }


def picture(comparison: Comparison) -> str:
    """One bar for each way of decoding, as text, with its seconds; "" where the speeds are no result."""
    if comparison.speed.withheld:
        return ""
    rates = {name: total.tokens / total.seconds for name, total in comparison.totals.items()}
    widest = max(rates.values())
    lines = []
    for name, total in comparison.totals.items():
        bar = "█" * max(1, round(BAR * rates[name] / widest))
        seconds = f"{total.seconds:.1f} s"
        if total.cpu_seconds is not None:
            seconds += f", {total.cpu_seconds:.1f} s of CPU"
        lines.append(f"{name:<7} {bar:<{BAR}} {rates[name]:.0f} tokens/s ({seconds})")
    return "\n".join(lines)


def verdict(comparison: Comparison, name: str) -> str:
    """The result in one line."""
    tau = comparison.dflash.tau_of_drafting_passes
    count = len(comparison.pairs)
    parts = [
        comparison.speed.sentence,
        *([] if comparison.is_in_turns else ["one server after the other, so a change of the machine counts as speed"]),
        "acceptance length not published" if tau is None else f"acceptance length {tau:.2f} (tau of drafting passes)",
        f"{comparison.num_equal} of {count} answers equal",
        f"doctor finds {'; '.join(each.name for each in comparison.found_by_doctor) or 'nothing wrong'}",
    ]
    return f"{name}: {'; '.join(parts)}"
