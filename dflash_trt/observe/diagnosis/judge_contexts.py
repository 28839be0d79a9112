# SPDX-License-Identifier: Apache-2.0
"""Finds acceptance that falls at long contexts or on a repeated prefix; pure functions."""

from __future__ import annotations

from dflash_trt.observe.diagnosis.causes import EndpointFinding, finding
from dflash_trt.observe.diagnosis.group_comparison import comparable_values, loss_on_same_prompts, tau_text
from dflash_trt.observe.diagnosis.judge_acceptance import no_drafts
from dflash_trt.observe.diagnosis.noise import (
    is_share_below,
)
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.endpoints.identify import ServerKind

COLLAPSED = 0.2
"""Share of the short prompts' accepted drafts below which long contexts, or temperature 1, have collapsed."""


def long_contexts(
    kind: ServerKind, short: ProbeGroup, long: ProbeGroup, baseline: ProbeGroup | None
) -> list[EndpointFinding]:
    """Acceptance that collapses at long contexts, but not at short ones."""
    lengths = [sample.input_tokens for sample in long.samples if sample.input_tokens]
    size = f"at {min(lengths)} to {max(lengths)} tokens" if lengths else "at long contexts"
    if found := no_drafts(kind, long, "no drafts at long contexts", "no drafter"):
        return found
    names = ("window", "rope", "prefix")
    if is_share_below(*comparable_values(long, short), COLLAPSED):
        figure = f"{tau_text(long)} {size}, {tau_text(short)} at short ones; {_dead_from(long)}"
        return [finding(kind, "acceptance collapses at long contexts", figure, *names)]
    if baseline is not None and (loss := loss_on_same_prompts(long, baseline)) is not None:
        figure = f"{tau_text(long)} {size}, {tau_text(baseline)} in the baseline: {loss:.0%} fewer drafts accepted"
        return [finding(kind, "acceptance at long contexts below the baseline", figure, *names, "scales")]
    return []


def repeated_prefixes(kind: ServerKind, first: ProbeGroup, again: ProbeGroup) -> list[EndpointFinding]:
    """Acceptance that falls if a prompt is in a prefix cache."""
    if found := no_drafts(kind, again, "no drafts on a repeated prefix", "prefix"):
        return found
    if (loss := loss_on_same_prompts(again, first)) is None:
        return []
    cached = sum(sample.cached_tokens or 0 for sample in again.samples)
    hits = f"; {cached} of its tokens came from the cache" if cached else ""
    figure = f"{tau_text(first)} the first time, {tau_text(again)} the second: {loss:.0%} fewer drafts accepted{hits}"
    return [finding(kind, "acceptance falls on a repeated prefix", figure, "prefix")]


def prefix_hits(kind: ServerKind, again: ProbeGroup, hits: int | None) -> list[EndpointFinding]:
    """A prefix cache that is on but never hits; `hits`: tokens, None if the server does not report them."""
    if hits != 0 or any(sample.cached_tokens for sample in again.samples) or not again.samples:
        return []
    figure = f"0 tokens from the prefix cache for {len(again.samples)} prompts that it had seen"
    return [finding(kind, "prefix cache without hits", figure, "prefix hits")]


def _dead_from(group: ProbeGroup) -> str:
    """The position from which draft tokens are no longer accepted."""
    shares = group.shares_by_position
    first = next((index for index, share in enumerate(shares) if share < 0.01), None)
    return "all positions suffer" if first is None else f"no draft is accepted after position {first}"
