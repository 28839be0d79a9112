# SPDX-License-Identifier: Apache-2.0
"""Two groups of answers compared: acceptance on the same prompts, and texts."""

from __future__ import annotations

from dflash_trt.observe.diagnosis.noise import (
    is_first_compared,
    paired_loss,
)
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup

PAIRED = 0.05
"""Smallest reported loss of accepted draft tokens on the same prompts."""


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
