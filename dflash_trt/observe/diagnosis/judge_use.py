# SPDX-License-Identifier: Apache-2.0
"""Finds uses that drafts slow down or hardly help; pure functions."""

from __future__ import annotations

from statistics import fmean

from dflash_trt.observe.diagnosis.causes import EndpointFinding, finding
from dflash_trt.observe.diagnosis.group_comparison import comparable_values, tau_text
from dflash_trt.observe.diagnosis.judge_contexts import COLLAPSED
from dflash_trt.observe.diagnosis.noise import is_ratio_below, is_share_below
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.diagnosis.speed_probe import BATCH, Speed
from dflash_trt.observe.endpoints.identify import ServerKind

SLOWER = 0.95
"""Share of plain decoding's speed below which drafts cost time."""
RARE = 0.1
"""Acceptance at a position below which a draft token is rarely worth its verification."""


def slow_drafts(kind: ServerKind, speeds: list[Speed]) -> list[EndpointFinding]:
    """Slower with drafts than without."""
    findings = []
    for concurrency in (1, BATCH):
        rates = {speed.draft_length: speed.tokens_per_second for speed in speeds if speed.concurrency == concurrency}
        drafted, plain = rates.get(None, []), rates.get(0, [])
        if is_ratio_below(drafted, plain, SLOWER):
            best = max(rates, key=lambda length: fmean(rates[length]))
            length = "the server's choice" if best is None else best
            figure = (
                f"{concurrency} at a time: {fmean(drafted):.0f} tokens/s with drafts, {fmean(plain):.0f} without;"
                f" best with a draft length of {length}"
            )
            findings.append(finding(kind, "slower than plain decoding", figure, "batch"))
    return findings


def drafting_notes(
    kind: ServerKind, short: ProbeGroup, drawn: ProbeGroup, foreign: ProbeGroup, thinking: tuple[ProbeGroup, ProbeGroup]
) -> list[EndpointFinding]:
    """Facts that are faults only for some uses."""
    compared = [
        (foreign, "in other languages", short, "in English", 0.5, "other languages are drafted worse", "language"),
        (drawn, "at temperature 1", short, "at 0", COLLAPSED, "few drafts are accepted when sampling", "independent"),
        *((w, f"with {w.name}", b, f"with {b.name}", 0.5, f"drafted worse with {w.name}", "thinking")
          for w, b in (thinking, thinking[::-1])),
    ]  # fmt: skip
    findings = [
        finding(kind, name, f"{tau_text(worse)} {where}, {tau_text(better)} {usually}", cause)
        for worse, where, better, usually, share, name, cause in compared
        if is_share_below(*comparable_values(worse, better), share)
    ]
    # If a server sometimes verifies fewer drafts, a late position's share reflects this more than the draft.
    is_whole = (short.draft_length or 0) > 0.9 * len(short.shares_by_position)
    shares = short.shares_by_position if is_whole else []
    worth = next((i for i, share in enumerate(shares) if share < RARE), len(shares))
    if worth < len(shares):
        figure = f"draft {worth + 1} of {len(shares)} is accepted in {shares[worth]:.0%} of passes"
        findings.append(finding(kind, "drafts that seldom pay", figure, "length"))
    return findings
