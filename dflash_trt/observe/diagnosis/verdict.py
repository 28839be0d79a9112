# SPDX-License-Identifier: Apache-2.0
"""The verdict of a diagnosis: for each check whether it found a fault, none, or could not be made, and why."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

import msgspec

from dflash_trt.observe.diagnosis.causes import EndpointFinding, finding
from dflash_trt.observe.diagnosis.judge_acceptance import (
    POOREST,
    in_doubt,
    low_acceptance,
    no_drafts,
    not_judged,
    not_seen,
    published_range,
)
from dflash_trt.observe.diagnosis.judge_contexts import long_contexts, prefix_hits, repeated_prefixes
from dflash_trt.observe.diagnosis.judge_sampling import MIN_DRAWN, is_drawn, lossless, sampled_acceptance, temperature
from dflash_trt.observe.diagnosis.judge_use import SLOWER, drafting_notes, slow_drafts
from dflash_trt.observe.diagnosis.noise import MIN_SAMPLES, is_ratio_below
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.diagnosis.probes import BATCH, MIN_LONG, NO_PLAIN, Speed
from dflash_trt.observe.diagnosis.published_tau import published_tau
from dflash_trt.observe.endpoints.identify import Runtime

NOT_MEASURED = "not measured"
NO_LOAD = "left out by --no-load"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One question about a server, and what came of it."""

    name: str
    verdict: Literal["fine", "WRONG", "not measured"]
    figure: str
    """What was measured, or why it was not."""


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """What the probes brought."""

    short: ProbeGroup
    served: ProbeGroup
    seeds: tuple[ProbeGroup, ProbeGroup]
    prefixes: tuple[ProbeGroup, ProbeGroup]
    long: ProbeGroup
    plain: ProbeGroup
    foreign: ProbeGroup
    thinking: tuple[ProbeGroup, ProbeGroup]
    speeds: list[Speed]
    speeds_missing: str
    """Why speeds are missing, or not all there."""
    unreadable: str
    """Why published figures could not be read."""
    how: str
    """From which figures acceptance was read, or why from none."""

    @property
    def groups(self) -> list[ProbeGroup]:
        """In the order in which they were asked."""
        return [
            self.short, self.served, *self.seeds, *self.prefixes, self.long, self.plain, self.foreign, *self.thinking
        ]  # fmt: skip


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Every check; findings are those that went wrong, `unmeasured` those that could be made and were not."""

    checks: list[Check]
    findings: list[EndpointFinding]
    unmeasured: list[EndpointFinding]
    notes: list[EndpointFinding]


class _Checks:
    """Collects checks and their findings."""

    def __init__(self, runtime: Runtime) -> None:
        self.kind = runtime.kind
        self.checks: list[Check] = []
        self.findings: list[EndpointFinding] = []
        self.unmeasured: list[EndpointFinding] = []

    def add(
        self, name: str, found: list[EndpointFinding], missing: str, figure: str, *, is_left_out: bool = False
    ) -> None:
        """A check that found something, or was not made because something is `missing`, or found nothing.

        What is missing is a finding, too, unless it `is_left_out`.
        """
        self.findings += found
        verdict: Literal["fine", "WRONG", "not measured"] = "WRONG" if found else "not measured" if missing else "fine"
        self.checks.append(Check(name=name, verdict=verdict, figure=found[0].figure if found else missing or figure))
        if verdict == NOT_MEASURED and not is_left_out:
            self.unmeasured.append(finding(self.kind, f"{name} not measured", missing, "slow"))


def judged(
    runtime: Runtime, probed: Probed, healthy: dict[str, ProbeGroup], expected_tau: float | None, hits: int | None
) -> Verdict:
    """All checks; `healthy`: groups of the baseline by name, `hits`: tokens that the prefix cache brought."""
    kind, short = runtime.kind, probed.short
    checks = _Checks(runtime)
    seen = not_seen(kind, short, probed.unreadable, probed.how)
    checks.unmeasured += seen
    unseen = seen[0].figure if seen else ""
    _acceptance(checks, runtime, probed, healthy.get(short.name), expected_tau, unseen)
    spoiled = unseen or ("acceptance is wrong already with short prompts" if checks.findings else "")
    if kind == "dflash-trt":
        found, missing = [] if spoiled else _stopped(runtime, probed), spoiled or _too_few(probed.served)
        checks.add("drafting", found, missing, _figure(probed.served), is_left_out=bool(spoiled))
    first, again = probed.prefixes
    found = [] if spoiled else long_contexts(kind, short, probed.long, healthy.get(probed.long.name))
    missing, is_left_out = spoiled or _not_long(probed.long), bool(spoiled) or probed.long.is_left_out
    checks.add("long contexts", found, missing, _figure(probed.long), is_left_out=is_left_out)
    found = [] if spoiled else repeated_prefixes(kind, first, again)
    figure = f"{_figure(first)}, then {_figure(again)}"
    checks.add("repeated prefixes", found, spoiled or _without_figures(again), figure, is_left_out=bool(spoiled))
    drawn = probed.seeds[0]
    if drawn.name in healthy:
        found = [] if spoiled or checks.findings else sampled_acceptance(kind, drawn, healthy[drawn.name])
        missing = spoiled or _without_figures(drawn)
        checks.add("acceptance when sampling", found, missing, _figure(drawn), is_left_out=bool(spoiled))
    pairs = f"{len(probed.seeds[1].samples)} prompts, two seeds: the answers differ"
    checks.add("temperature", temperature(kind, *probed.seeds), _too_short(*probed.seeds), pairs)
    found, plain = lossless(kind, short, probed.plain), probed.plain
    same = f"{len(plain.samples)} greedy answers are plain decoding's"
    checks.add("lossless", found, _too_few(plain), same, is_left_out=plain.is_left_out)
    _speeds(checks, probed)
    notes = [] if spoiled else drafting_notes(kind, short, drawn, probed.foreign, probed.thinking)
    notes += prefix_hits(kind, again, hits)
    return Verdict(checks=checks.checks, findings=checks.findings, unmeasured=checks.unmeasured, notes=notes)


def _speeds(checks: _Checks, probed: Probed) -> None:
    """Whether drafts pay, beyond what the machine's pace varies by."""
    missing, figure, is_left_out = probed.speeds_missing, "", probed.speeds_missing in (NO_LOAD, NO_PLAIN)
    if not missing:
        figure = _speed(shares := _speed_shares(probed.speeds))
        if min(shares) < SLOWER:
            missing, is_left_out = f"{figure}: too noisy, repeat it on an idle machine", True
    checks.add("speed", slow_drafts(checks.kind, probed.speeds), missing, figure, is_left_out=is_left_out)


def _acceptance(
    checks: _Checks, runtime: Runtime, probed: Probed, baseline: ProbeGroup | None, expected_tau: float | None,
    unseen: str,
) -> None:  # fmt: skip
    """Whether drafts are accepted as they should be, by the first that there is: a baseline, a figure, plain speed."""
    short, kind = probed.short, runtime.kind
    length = short.draft_length or runtime.num_draft_tokens
    published = published_tau(runtime, length)
    found = [] if unseen else low_acceptance(kind, short, baseline, expected_tau, published, length)
    missing, against = unseen, ""
    doubt = [] if found or unseen else in_doubt(kind, short, baseline, expected_tau, published)
    if doubt:
        checks.unmeasured += doubt
        missing = doubt[0].figure
    elif baseline is not None:
        against = f"the baseline's {baseline.tau_of_drafting_passes or 1:.2f}"
    elif expected_tau is not None:
        against = f"the expected {expected_tau:.2f}"
    elif published is not None:
        against = f"the published {published_range(published)}"
    elif not probed.speeds_missing:
        shares = _speed_shares(probed.speeds)
        against = f"{_speed(shares)}" if shares[0] >= 1 else f"the poorest healthy uses' {1 + POOREST:.2f}"
    elif not (found or unseen):
        checks.unmeasured += not_judged(kind, short, length or 0)
        missing = f"{_figure(short)}: nothing to compare it with"
    checks.add("acceptance", found, missing, f"{_figure(short)}, against {against}", is_left_out=True)


def _stopped(runtime: Runtime, probed: Probed) -> list[EndpointFinding]:
    """A server that drafts only where a request says so, though plain decoding is not faster."""
    rates = {s.draft_length: s.tokens_per_second for s in probed.speeds if s.concurrency == 1 and s.draft_length}
    plain = next((s.tokens_per_second for s in probed.speeds if (s.concurrency, s.draft_length) == (1, 0)), [])
    if any(is_ratio_below(drafted, plain, 1.0) for drafted in rates.values()):
        return []
    return no_drafts(runtime.kind, probed.served, "drafting stopped", "stopped", "no drafter")


def _too_few(group: ProbeGroup) -> str:
    """Why a group cannot be judged; empty where it can."""
    return "" if len(group.samples) >= MIN_SAMPLES else group.why_not or "too few answers"


def _too_short(first: ProbeGroup, drawn: ProbeGroup) -> str:
    """Why drawn answers cannot be told from greedy ones; empty where they can."""
    if is_drawn(first, drawn):
        return ""
    shortest = min((sample.output_tokens for sample in drawn.samples), default=0)
    return _too_few(drawn) or ("" if shortest >= MIN_DRAWN else f"answers of {shortest} tokens are too short")


def _without_figures(group: ProbeGroup) -> str:
    """Why a group's acceptance cannot be judged; empty where it can."""
    if missing := _too_few(group):
        return missing
    values = group.values(is_first=False)
    return "" if len(values) >= MIN_SAMPLES else f"{len(values)} of {len(group.samples)} answers had verified drafts"


def _not_long(long: ProbeGroup) -> str:
    """Why acceptance at long contexts cannot be judged; empty where it can."""
    longest = max((sample.input_tokens or MIN_LONG for sample in long.samples), default=MIN_LONG)
    return _without_figures(long) if longest >= MIN_LONG else f"the server counts {longest} tokens in long prompts"


def _figure(group: ProbeGroup) -> str:
    tau = group.tau_of_drafting_passes
    return "no drafts" if tau is None else f"tau of drafting passes {tau:.2f}"


def _speed_shares(speeds: Sequence[Speed]) -> list[float]:
    """Speed over plain decoding's with 1 and BATCH requests at a time."""
    rates = {(speed.concurrency, speed.draft_length): speed.tokens_per_second for speed in speeds}
    return [fmean(rates[concurrency, None]) / fmean(rates[concurrency, 0]) for concurrency in (1, BATCH)]


def _speed(shares: Sequence[float]) -> str:
    """'1.52 times plain decoding's speed, 0.96 times with 16 at a time'."""
    return f"{shares[0]:.2f} times plain decoding's speed, {shares[1]:.2f} times with {BATCH} at a time"


def speeds_missing(speeds: list[Speed], lengths: Sequence[int | None], why_not: str) -> str:
    """Why drafts and plain decoding cannot be compared; empty where they can."""
    if 0 not in lengths:
        return NO_PLAIN
    whole = [speed for speed in speeds if len(speed.tokens_per_second) >= MIN_SAMPLES]
    return "" if len(whole) == 2 * len(lengths) else why_not or "too few rounds"
