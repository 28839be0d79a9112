# SPDX-License-Identifier: Apache-2.0
"""Tests for differences beyond noise. The unit is a request: passes of one request resemble each other.

Every test is one-sided at 99.95 %: a diagnosis makes a handful, and a healthy server must not be reported in years.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup

# Student's t, one-sided 99.95 %, for 1, 2, ... degrees of freedom; the last one for all more, which is conservative.
T_QUANTILES = (
    636.6, 31.60, 12.92, 8.610, 6.869, 5.959, 5.408, 5.041, 4.781, 4.587, 4.437, 4.318, 4.221, 4.140, 4.073, 4.015,
)  # fmt: skip
MIN_SAMPLES = 4
SAME_LENGTH = 0.05
"""Two mean draft lengths that differ by less than this share may be compared by tau."""
PAIRED = 0.05
"""Smallest reported loss of accepted draft tokens on the same prompts."""


def upper_bound(values: Sequence[float]) -> float:
    """Upper bound on their mean; infinite if there are too few."""
    return _bound(fmean(values), _error(values), len(values)) if len(values) >= MIN_SAMPLES else math.inf


def is_share_below(values: Sequence[float], reference: Sequence[float], share: float) -> bool:
    """Whether mean(values) < share * mean(reference) beyond noise, for other prompts than the reference's."""
    if min(len(values), len(reference)) < MIN_SAMPLES:
        return False
    error = math.hypot(_error(values), share * _error(reference))
    return _bound(fmean(values) - share * fmean(reference), error, min(len(values), len(reference))) < 0


def paired_loss(after: dict[str, float], before: dict[str, float], smallest: float) -> float | None:
    """Share of `before` that `after` lost on the same prompts; None if it is noise, or less than `smallest`."""
    names = sorted(after.keys() & before.keys())
    if len(names) < MIN_SAMPLES:
        return None
    # Relative to the pair's mean, from -2 to 2, so that one easy prompt cannot hide a collapse of all others.
    differences = [
        2 * (after[name] - before[name]) / (after[name] + before[name]) if after[name] + before[name] > 0 else 0.0
        for name in names
    ]
    reference = fmean(before[name] for name in names)
    if reference <= 0 or _bound(fmean(differences), _error(differences), len(names)) >= 0:
        return None
    loss = 1 - fmean(after[name] for name in names) / reference
    return loss if loss >= smallest else None


def is_ratio_below(values: Sequence[float], reference: Sequence[float], ratio: float) -> bool:
    """Whether values[i] / reference[i], measured in pairs, lies below `ratio` beyond noise; all are positive."""
    logarithms = [math.log(value / base) for value, base in zip(values, reference, strict=False)]
    return len(logarithms) >= MIN_SAMPLES and upper_bound(logarithms) < math.log(ratio)


def is_first_compared(group: ProbeGroup, reference: ProbeGroup) -> bool:
    """Whether only the first draft token's acceptance can be compared, because drafts were not equally long."""
    lengths = group.draft_length, reference.draft_length
    if None in lengths or not group.shares_by_position or not reference.shares_by_position:
        return False
    shorter, longer = sorted(length or 0.0 for length in lengths)
    return longer - shorter > SAME_LENGTH * longer


def _error(values: Sequence[float]) -> float:
    return math.sqrt(variance(values) / len(values)) if len(values) > 1 else math.inf


def _bound(mean: float, error: float, count: int) -> float:
    return mean + T_QUANTILES[min(count - 1, len(T_QUANTILES)) - 1] * error


def _comparable(group: ProbeGroup, reference: ProbeGroup) -> tuple[dict[str, float], dict[str, float]]:
    is_first = is_first_compared(group, reference)
    return group.values(is_first=is_first), reference.values(is_first=is_first)


def comparable_values(group: ProbeGroup, reference: ProbeGroup) -> tuple[list[float], list[float]]:
    after, before = _comparable(group, reference)
    return list(after.values()), list(before.values())


def loss_on_same_prompts(group: ProbeGroup, reference: ProbeGroup, smallest: float = PAIRED) -> float | None:
    """Share of accepted draft tokens lost on the same prompts; None if it is noise or small."""
    return paired_loss(*_comparable(group, reference), smallest)


def text_pairs(group: ProbeGroup, reference: ProbeGroup) -> list[tuple[str, str]]:
    """Both answers to each prompt that both groups contain."""
    texts = {sample.prompt: sample.text for sample in reference.samples}
    return [(texts[sample.prompt], sample.text) for sample in group.samples if sample.prompt in texts]


def tau_text(group: ProbeGroup | None) -> str:
    tau = None if group is None else group.tau_of_drafting_passes
    return "no tau" if tau is None else f"tau of drafting passes {tau:.2f}"
