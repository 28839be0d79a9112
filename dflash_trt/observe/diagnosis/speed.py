# SPDX-License-Identifier: Apache-2.0
"""The speed of a server with drafts and without, alone and under load, and whether drafts pay, beyond the noise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from dflash_trt.api.paired_speed import SAME
from dflash_trt.errors import EndpointError
from dflash_trt.observe.diagnosis.checks import Checks, EndpointFinding, finding
from dflash_trt.observe.diagnosis.noise import MIN_SAMPLES, is_ratio_below
from dflash_trt.observe.diagnosis.probe_answers import prompts
from dflash_trt.observe.diagnosis.prober import OUT_OF_TIME, OutOfTimeError, Prober
from dflash_trt.observe.endpoints.identify import ServerKind

BATCH = 16
ROUNDS = 5
LOAD_TOKENS = 32
NO_PLAIN = "this runtime decodes no single request without drafts"
NO_LOAD = "left out by --no-load"
SLOWER = 0.95
"""Share of plain decoding's speed below which drafts cost time."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens a second of all requests together, once for each round."""

    concurrency: int
    draft_length: int | None
    """Maximum draft tokens per step; 0 disables speculation, None leaves the choice to the server."""
    tokens_per_second: list[float]


def draft_lengths(prober: Prober, num_draft_tokens: int) -> list[int | None]:
    """Draft lengths whose speeds can be measured; None: the server's choice."""
    return [None, 0, max(1, num_draft_tokens // 2)] if prober.runtime.kind == "dflash-trt" else [None]


def speeds(prober: Prober, lengths: list[int | None]) -> tuple[list[Speed], str]:
    """Speeds of one and sixteen requests at a time, with each length in changing order; also why some are missing."""
    questions = list(prompts().short.values())
    measured: dict[tuple[int, int | None], list[float]] = {}
    why_not = ""
    try:
        for concurrency in (1, BATCH):
            for turn in range(ROUNDS + 1):
                for length in lengths if turn % 2 else lengths[::-1]:
                    asked = questions[:concurrency]
                    tokens, seconds = prober.ask_together(asked, max_tokens=LOAD_TOKENS, draft_length=length)
                    if turn > 0:  # the first warms up: graphs are captured, draft lengths found
                        measured.setdefault((concurrency, length), []).append(tokens / seconds)
    except OutOfTimeError:
        why_not = OUT_OF_TIME
    except EndpointError as error:
        if error.status != 429:
            raise
        why_not = f"the server refuses {BATCH} requests at a time"
    return [
        Speed(concurrency=concurrency, draft_length=length, tokens_per_second=rates)
        for (concurrency, length), rates in measured.items()
    ], why_not


def check_speeds(checks: Checks, speeds: list[Speed], missing: str) -> None:
    """Whether drafts pay, beyond the variation of the machine's speed; `missing`: why speeds are."""
    figure, is_left_out = "", missing in (NO_LOAD, NO_PLAIN)
    if not missing:
        figure = speed_text(shares := speed_shares(speeds))
        if min(shares) < 1 - SAME:
            missing, is_left_out = f"{figure}: too noisy or too close to tell, repeat it on an idle machine", True
    checks.add("speed", slow_drafts(checks.kind, speeds), missing, figure, is_left_out=is_left_out)


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
