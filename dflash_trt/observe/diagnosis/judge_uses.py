# SPDX-License-Identifier: Apache-2.0
"""Finds faults of certain uses: long contexts, repeated prefixes, sampling, thinking, languages; pure functions."""

from __future__ import annotations

from dflash_trt.observe.diagnosis.checks import EndpointFinding, finding
from dflash_trt.observe.diagnosis.judge_acceptance import no_drafts
from dflash_trt.observe.diagnosis.noise import (
    MIN_SAMPLES,
    comparable_values,
    is_share_below,
    loss_on_same_prompts,
    tau_text,
    text_pairs,
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


RARE = 0.1
"""Acceptance at a position below which a draft token is rarely worth its verification."""


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
