# SPDX-License-Identifier: Apache-2.0
"""Finds faults of sampling, and texts that are not plain decoding's; pure functions."""

from __future__ import annotations

from dflash_trt.observe.diagnosis.causes import EndpointFinding, finding
from dflash_trt.observe.diagnosis.group_comparison import loss_on_same_prompts, tau_text, text_pairs
from dflash_trt.observe.diagnosis.noise import (
    MIN_SAMPLES,
)
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.endpoints.identify import ServerKind

SAMPLED = 0.5
"""Smallest reported loss at temperature 1, where a seed's text, and thus its acceptance, may vary."""
MIN_DRAWN = 8
"""Tokens of an answer that two seeds rarely draw identically."""


def is_drawn(first: ProbeGroup, second: ProbeGroup) -> bool:
    """Whether an answer differs between two seeds, however short it is."""
    return any(left != right for left, right in text_pairs(second, first))


def temperature(kind: ServerKind, first: ProbeGroup, second: ProbeGroup) -> list[EndpointFinding]:
    """Temperature 1 that is greedy."""
    pairs = text_pairs(second, first)
    is_long = all(sample.output_tokens >= MIN_DRAWN for sample in second.samples)
    if len(pairs) >= MIN_SAMPLES and is_long and all(left == right for left, right in pairs):
        figure = f"{len(pairs)} of {len(pairs)} answers at temperature 1 are the same for two seeds"
        return [finding(kind, "temperature ignored", figure, "temperature")]
    return []


def sampled_acceptance(kind: ServerKind, drawn: ProbeGroup, baseline: ProbeGroup | None) -> list[EndpointFinding]:
    """Fewer drafts accepted at temperature 1 than in a healthy run of the same seed."""
    if baseline is None or (loss := loss_on_same_prompts(drawn, baseline, SAMPLED)) is None:
        return []
    figure = (
        f"{tau_text(drawn)} at temperature 1, {tau_text(baseline)} in the baseline: {loss:.0%} fewer drafts accepted"
    )
    return [finding(kind, "acceptance when sampling below the baseline", figure, "independent", "prefix")]


def lossless(kind: ServerKind, short: ProbeGroup, plain: ProbeGroup) -> list[EndpointFinding]:
    """Greedy texts that are not plain decoding's."""
    pairs = text_pairs(plain, short)
    differing = sum(left != right for left, right in pairs)
    if not differing:
        return []
    figure = f"{differing} of {len(pairs)} greedy answers differ from plain decoding's"
    return [finding(kind, "text differs from plain decoding", figure, "numerics")]
