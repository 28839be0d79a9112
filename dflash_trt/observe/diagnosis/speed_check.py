# SPDX-License-Identifier: Apache-2.0
"""Whether drafts pay, beyond the noise of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from dflash_trt.api.paired_speed import SAME
from dflash_trt.observe.diagnosis.checks import Checks, EndpointFinding, finding
from dflash_trt.observe.diagnosis.noise import MIN_SAMPLES, is_ratio_below
from dflash_trt.observe.diagnosis.probes import NO_LOAD, NO_PLAIN, Probed
from dflash_trt.observe.diagnosis.speed_probe import BATCH, Speed
from dflash_trt.observe.endpoints.identify import ServerKind

SLOWER = 0.95
"""Share of plain decoding's speed below which drafts cost time."""


def check_speeds(checks: Checks, probed: Probed) -> None:
    """Whether drafts pay, beyond the variation of the machine's speed."""
    missing, figure, is_left_out = probed.speeds_missing, "", probed.speeds_missing in (NO_LOAD, NO_PLAIN)
    if not missing:
        figure = speed_text(shares := speed_shares(probed.speeds))
        if min(shares) < 1 - SAME:
            missing, is_left_out = f"{figure}: too noisy or too close to tell, repeat it on an idle machine", True
    checks.add("speed", slow_drafts(checks.kind, probed.speeds), missing, figure, is_left_out=is_left_out)


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


def speed_shares(speeds: Sequence[Speed]) -> list[float]:
    """Speed over plain decoding's with 1 and BATCH requests at a time."""
    rates = {(speed.concurrency, speed.draft_length): speed.tokens_per_second for speed in speeds}
    return [fmean(rates[concurrency, None]) / fmean(rates[concurrency, 0]) for concurrency in (1, BATCH)]


def speed_text(shares: Sequence[float]) -> str:
    """'1.52 times plain decoding's speed, 0.96 times with 16 at a time'."""
    return f"{shares[0]:.2f} times plain decoding's speed, {shares[1]:.2f} times with {BATCH} at a time"


def speeds_missing(speeds: list[Speed], lengths: Sequence[int | None], why_not: str) -> str:
    """Why drafts and plain decoding cannot be compared; empty if they can."""
    if 0 not in lengths:
        return NO_PLAIN
    whole = [speed for speed in speeds if len(speed.tokens_per_second) >= MIN_SAMPLES]
    return "" if len(whole) == 2 * len(lengths) else why_not or "too few rounds"
