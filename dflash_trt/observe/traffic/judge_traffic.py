# SPDX-License-Identifier: Apache-2.0
"""Judges a window of a server's traffic: against an earlier one, against an expected figure, and in its parts."""

from __future__ import annotations

from dflash_trt.api.acceptance import NEAR_ZERO_TAU
from dflash_trt.observe.diagnosis.checks import Checks, EndpointFinding, Verdict, finding
from dflash_trt.observe.diagnosis.judge_acceptance import near_zero
from dflash_trt.observe.diagnosis.judge_parts import MIN_TOKENS, cliff, dead_engines, engines_text
from dflash_trt.observe.endpoints.identify import ServerKind
from dflash_trt.observe.traffic.traffic import Traffic

MIN_PASSES = 1000
"""Verify passes below which acceptance is noise, as in docs/dashboards' alerts."""
DRIFT = 0.85
"""Share of the earlier figure below which acceptance or draft length has fallen: smaller changes come with prompts."""
SLOWER = 1.25
"""Ratio to the earlier seconds a token above which users are served more slowly."""
MIN_QUERIES = 10_000
"""Prompt tokens without a prefix hit that are no accident."""
SOME_HITS = 0.02
FULL = 0.95


def judge(kind: ServerKind, now: Traffic, earlier: Traffic | None, expected_tau: float | None) -> Verdict:
    """All checks; those that need an `earlier` window or an expected figure are not measured without."""
    checks = Checks(kind, "traffic")
    idle = "" if now.output_tokens >= MIN_TOKENS else f"{now.output_tokens} output tokens in {now.seconds:.0f} s"
    passes = now.acceptance.drafting_passes
    without = not idle and not passes
    figure = f"{now.output_tokens} output tokens, and no verified draft"
    found = [finding(kind, "no drafts", figure, "no drafter")] if without else []
    checks.add("drafting", found, idle, f"{passes} verify passes with drafts")
    few = idle or ("" if passes >= MIN_PASSES else f"{passes} verify passes with drafts, fewer than {MIN_PASSES}")
    _acceptance(checks, now, earlier, expected_tau, "there are no drafts" if without else few, is_left_out=without)
    if len(now.engines) > 1:
        checks.add(
            "engines", dead_engines(kind, list(now.engines)), idle, engines_text(list(now.engines)), is_left_out=True
        )
    unpublished = "" if now.acceptance.accepted_by_position else "the server publishes no acceptance by position"
    found = [] if few or unpublished else cliff(kind, now.acceptance)
    checks.add("positions", found, few or unpublished, "acceptance falls evenly", is_left_out=True)
    if earlier is not None:
        _against(checks, now, earlier, few)
    return checks.verdict(_notes(kind, now))


def _acceptance(
    checks: Checks,
    now: Traffic,
    earlier: Traffic | None,
    expected_tau: float | None,
    missing: str,
    *,
    is_left_out: bool,
) -> None:
    """Acceptance near zero, below the earlier window's, or below what was expected."""
    kind, tau = checks.kind, now.acceptance.tau_of_drafting_passes or 1.0
    if not missing and tau < NEAR_ZERO_TAU:
        checks.add("acceptance", [near_zero(kind, f"acceptance length {tau:.2f}")], "", "")
        return
    usual, word = expected_tau, "expected"
    if earlier is not None and earlier.acceptance.drafting_passes >= MIN_PASSES:
        usual, word = earlier.acceptance.tau_of_drafting_passes, "before"
    if not missing and usual is None:
        missing = (
            f"acceptance length {tau:.2f}, and nothing to compare it with: --expect-tau, --baseline or --prometheus"
        )
    figure = f"acceptance length {tau:.2f}" if usual is None else f"acceptance length {tau:.2f}, {word} {usual:.2f}"
    found = []
    if not missing and usual is not None and tau < DRIFT * usual:
        causes = ("template", "thinking", "language", "prefix", "pair", "scales", "taps")
        name = "acceptance has fallen" if word == "before" else "acceptance below what was expected"
        found = [finding(kind, name, figure, *causes)]
    checks.add("acceptance", found, missing, figure, is_left_out=is_left_out)


def _against(checks: Checks, now: Traffic, earlier: Traffic, few: str) -> None:
    """Draft length, prefix hits and speed against the earlier window."""
    kind = checks.kind
    length, usual = now.acceptance.draft_length, earlier.acceptance.draft_length
    if length is not None and usual is not None:
        figure = f"{length:.1f} drafts a step, before {usual:.1f}"
        found = [finding(kind, "fewer drafts a step", figure, "stopped", "batch")] if length < DRIFT * usual else []
        checks.add("draft length", [] if few else found, few, figure, is_left_out=True)
    if now.hit_rate is not None and earlier.hit_rate is not None:
        figure = f"{now.hit_rate:.0%} of prompt tokens were in the prefix cache, before {earlier.hit_rate:.0%}"
        enough = now.prefix_queries is None or now.prefix_queries >= MIN_QUERIES
        fell = earlier.hit_rate >= SOME_HITS and now.hit_rate < SOME_HITS * earlier.hit_rate
        missing = "" if enough else f"{now.prefix_queries:.0f} prompt tokens were looked up"
        found = [finding(kind, "prefix hits fell to zero", figure, "prefix hits")] if fell and enough else []
        checks.add("prefix cache", found, missing, figure, is_left_out=True)
    if now.tpot_seconds is not None and earlier.tpot_seconds is not None:
        figure = f"{now.tpot_seconds * 1e3:.1f} ms a token, before {earlier.tpot_seconds * 1e3:.1f}"
        slower = now.tpot_seconds > SLOWER * earlier.tpot_seconds
        checks.add(
            "speed per user",
            [finding(kind, "slower per user", figure, "batch", "memory")] if slower else [],
            "",
            figure,
        )


def _notes(kind: ServerKind, now: Traffic) -> list[EndpointFinding]:
    """Facts that are faults only for some uses."""
    notes = []
    if now.hit_rate == 0 and (now.prefix_queries or 0) >= MIN_QUERIES:
        figure = f"none of {now.prefix_queries:.0f} prompt tokens was in the prefix cache"
        notes.append(finding(kind, "no prefix hits", figure, "prefix hits"))
    if now.preemptions:
        figure = f"{now.preemptions:.0f} requests lost their pages in {now.seconds:.0f} s and were computed again"
        notes.append(finding(kind, "preemptions", figure, "memory"))
    elif now.cache_use is not None and now.cache_use >= FULL:
        notes.append(finding(kind, "the KV cache is full", f"{now.cache_use:.0%} in use", "memory"))
    if now.waiting:
        notes.append(finding(kind, "requests wait", f"{now.waiting:.1f} in the queue", "batch"))
    return notes
