# SPDX-License-Identifier: Apache-2.0
"""The verdict of a diagnosis: every check that its probes allow."""

from __future__ import annotations

from dflash_trt.observe.diagnosis.checks import Checks, EndpointFinding, Verdict
from dflash_trt.observe.diagnosis.judge_acceptance import (
    POOREST,
    in_doubt,
    low_acceptance,
    no_drafts,
    not_judged,
    not_seen,
    published_range,
)
from dflash_trt.observe.diagnosis.judge_parts import cliff, dead_engines, engines_text, rejected_requests
from dflash_trt.observe.diagnosis.judge_uses import (
    MIN_DRAWN,
    drafting_notes,
    is_drawn,
    long_contexts,
    lossless,
    prefix_hits,
    repeated_prefixes,
    sampled_acceptance,
    temperature,
)
from dflash_trt.observe.diagnosis.noise import MIN_SAMPLES, is_ratio_below
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.diagnosis.probes import MIN_LONG, Probed
from dflash_trt.observe.diagnosis.published_tau import published_tau
from dflash_trt.observe.diagnosis.speed import check_speeds, speed_shares, speed_text
from dflash_trt.observe.endpoints.identify import Runtime


def too_few(group: ProbeGroup) -> str:
    """Why a group cannot be judged; empty if it can."""
    return "" if len(group.samples) >= MIN_SAMPLES else group.why_not or "too few answers"


def too_short(first: ProbeGroup, drawn: ProbeGroup) -> str:
    """Why drawn answers cannot be distinguished from greedy ones; empty if they can."""
    if is_drawn(first, drawn):
        return ""
    shortest = min((sample.output_tokens for sample in drawn.samples), default=0)
    return too_few(drawn) or ("" if shortest >= MIN_DRAWN else f"answers of {shortest} tokens are too short")


def without_figures(group: ProbeGroup) -> str:
    """Why a group's acceptance cannot be judged; empty if it can."""
    if missing := too_few(group):
        return missing
    values = group.values(is_first=False)
    return "" if len(values) >= MIN_SAMPLES else f"{len(values)} of {len(group.samples)} answers had verified drafts"


def not_long(long: ProbeGroup) -> str:
    """Why acceptance at long contexts cannot be judged; empty if it can."""
    longest = max((sample.input_tokens or MIN_LONG for sample in long.samples), default=MIN_LONG)
    return without_figures(long) if longest >= MIN_LONG else f"the server counts {longest} tokens in long prompts"


def judged(
    runtime: Runtime, probed: Probed, healthy: dict[str, ProbeGroup], expected_tau: float | None, hits: int | None
) -> Verdict:
    """All checks; `healthy`: groups of the baseline by name, `hits`: tokens that the prefix cache brought."""
    kind, short = runtime.kind, probed.short
    checks = Checks(kind)
    seen = not_seen(kind, short, probed.unreadable, probed.how)
    checks.unmeasured += seen
    unseen = seen[0].figure if seen else ""
    _acceptance(checks, runtime, probed, healthy.get(short.name), expected_tau, unseen)
    if len(probed.engines) > 1:
        found = dead_engines(kind, probed.engines)
        checks.add(
            "engines",
            found,
            _without_requests(probed),
            f"acceptance length {engines_text(probed.engines)}",
            is_left_out=True,
        )
    spoiled = unseen or ("acceptance is wrong already with short prompts" if checks.findings else "")
    if kind == "dflash-trt":
        found, missing = [] if spoiled else _stopped(runtime, probed), spoiled or too_few(probed.served)
        checks.add("drafting", found, missing, _figure(probed.served), is_left_out=bool(spoiled))
    first, again = probed.prefixes
    found = [] if spoiled else long_contexts(kind, short, probed.long, healthy.get(probed.long.name))
    missing, is_left_out = spoiled or not_long(probed.long), bool(spoiled) or probed.long.is_left_out
    checks.add("long contexts", found, missing, _figure(probed.long), is_left_out=is_left_out)
    found = [] if spoiled else repeated_prefixes(kind, first, again)
    figure = f"{_figure(first)}, then {_figure(again)}"
    checks.add("repeated prefixes", found, spoiled or without_figures(again), figure, is_left_out=bool(spoiled))
    drawn = probed.seeds[0]
    if drawn.name in healthy:
        found = [] if spoiled or checks.findings else sampled_acceptance(kind, drawn, healthy[drawn.name])
        missing = spoiled or without_figures(drawn)
        checks.add("acceptance when sampling", found, missing, _figure(drawn), is_left_out=bool(spoiled))
    pairs = f"{len(probed.seeds[1].samples)} prompts, two seeds: the answers differ"
    checks.add("temperature", temperature(kind, *probed.seeds), too_short(*probed.seeds), pairs)
    found, plain = lossless(kind, short, probed.plain), probed.plain
    same = f"{len(plain.samples)} greedy answers are plain decoding's"
    checks.add("lossless", found, too_few(plain), same, is_left_out=plain.is_left_out)
    check_speeds(checks, probed.speeds, probed.speeds_missing)
    notes = [] if spoiled else drafting_notes(kind, short, drawn, probed.foreign, probed.thinking)
    notes += prefix_hits(kind, again, hits)
    return checks.verdict(notes)


def _acceptance(
    checks: Checks, runtime: Runtime, probed: Probed, baseline: ProbeGroup | None, expected_tau: float | None,
    unseen: str,
) -> None:  # fmt: skip
    """Whether acceptance is as expected, by the first available: a baseline, a figure, the speed without drafts."""
    short, kind = probed.short, runtime.kind
    length = short.draft_length or runtime.num_draft_tokens
    published = published_tau(runtime, length)
    found = [] if unseen else low_acceptance(kind, short, baseline, expected_tau, published, length)
    if not (found or unseen):
        found = [*rejected_requests(kind, short), *cliff(kind, short.acceptance)]
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
        shares = speed_shares(probed.speeds)
        against = f"{speed_text(shares)}" if shares[0] >= 1 else f"the lowest published, {1 + POOREST:.2f}"
    elif not (found or unseen):
        checks.unmeasured += not_judged(kind, short, length or 0)
        missing = f"{_figure(short)}: nothing to compare it with"
    checks.add("acceptance", found, missing, f"{_figure(short)}, against {against}", is_left_out=True)


def _without_requests(probed: Probed) -> str:
    """Why not all engines were judged; empty if they were."""
    names = [each.engine for each in probed.engines if not each.output_tokens]
    return f"engine {', '.join(names)} answered nothing in this time" if names else ""


def _stopped(runtime: Runtime, probed: Probed) -> list[EndpointFinding]:
    """A server that drafts only if a request asks for it, although plain decoding is not faster."""
    rates = {s.draft_length: s.tokens_per_second for s in probed.speeds if s.concurrency == 1 and s.draft_length}
    plain = next((s.tokens_per_second for s in probed.speeds if (s.concurrency, s.draft_length) == (1, 0)), [])
    if any(is_ratio_below(drafted, plain, 1.0) for drafted in rates.values()):
        return []
    return no_drafts(runtime.kind, probed.served, "drafting stopped", "stopped", "no drafter")


def _figure(group: ProbeGroup) -> str:
    tau = group.tau_of_drafting_passes
    return "no drafts" if tau is None else f"tau of drafting passes {tau:.2f}"
