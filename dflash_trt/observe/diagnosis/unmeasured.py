# SPDX-License-Identifier: Apache-2.0
"""Reasons why a group of answers cannot be judged; empty where it can."""

from __future__ import annotations

from dflash_trt.observe.diagnosis.judge_sampling import MIN_DRAWN, is_drawn
from dflash_trt.observe.diagnosis.noise import MIN_SAMPLES
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.diagnosis.probes import MIN_LONG


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
