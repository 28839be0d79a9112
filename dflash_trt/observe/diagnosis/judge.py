# SPDX-License-Identifier: Apache-2.0
"""What is wrong, from the groups of a diagnosis; pure functions. A client sees acceptance, no layers: where several
causes look alike, all are named, the likeliest first.
"""

from __future__ import annotations

from statistics import fmean

import msgspec

from dflash_trt.observe.diagnosis.causes import Cause, causes
from dflash_trt.observe.diagnosis.noise import (
    MIN_SAMPLES,
    is_first_compared,
    is_ratio_below,
    is_share_below,
    paired_loss,
    upper_bound,
)
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.diagnosis.probes import BATCH, Speed
from dflash_trt.observe.endpoints.identify import ServerKind

NEAR_ZERO = 0.25
"""Accepted drafts a pass: documented failures show 0.02 to 0.16 (tau 1.02 to 1.16), the poorest healthy uses 0.9."""
COLLAPSED = 0.2
"""Of the short prompts' accepted drafts a pass: what is left at long contexts, or is worth a note at temperature 1."""
PAIRED = 0.05
"""The smallest loss of accepted drafts on the same prompts that is told."""
SAMPLED = 0.5
"""The same at temperature 1, where the text of a seed need not be the same, and its acceptance varies with it."""
MILD, SEVERE = 0.25, 0.5
"""Losses of accepted drafts that make other causes likelier (docs/doctor.md)."""
SLOWER = 0.75
"""Of plain decoding's speed, beyond doubt: small differences change with the load."""
RARE = 0.1
"""Acceptance at a position below which a draft is seldom worth its verification."""


class EndpointFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong, or that is worth knowing."""

    name: str
    figure: str
    causes: list[Cause]
    """Likely ones, in this order."""


def not_seen(kind: ServerKind, short: ProbeGroup, unreadable: str) -> list[EndpointFinding]:
    """What could not be read or asked is never health."""
    findings = []
    if unreadable:
        findings.append(
            EndpointFinding(name="metrics cannot be read", figure=unreadable, causes=causes(kind, "metrics"))
        )
    if len(short.samples) < MIN_SAMPLES:
        figure = f"{len(short.samples)} short prompts were answered: {short.why_not or 'no more were asked'}"
        findings.append(EndpointFinding(name="too few answers", figure=figure, causes=causes(kind, "slow")))
    return findings


def low_acceptance(
    kind: ServerKind, short: ProbeGroup, baseline: ProbeGroup | None, expected_tau: float | None
) -> list[EndpointFinding]:
    """No drafts, drafts that are all rejected, or fewer accepted than in a healthy run."""
    drafting = [sample.acceptance.drafting_passes for sample in short.samples if sample.acceptance is not None]
    if drafting and not any(drafting):
        figure = f"{len(short.samples)} requests were answered without one verified draft"
        return [EndpointFinding(name="no drafts", figure=figure, causes=causes(kind, "no drafter"))]
    values = list(short.values(is_first=False).values())
    if len(values) >= MIN_SAMPLES and upper_bound(values) < NEAR_ZERO:
        order = ("scales", "taps", "head", "k_norm", "pair")
        figure = f"{_tau(short)}: nearly every draft is rejected"
        return [EndpointFinding(name="acceptance near zero", figure=figure, causes=causes(kind, *order))]
    if baseline is not None and (found := _below_baseline(kind, short, baseline)):
        return [found]
    if expected_tau is not None and values and is_share_below(values, [expected_tau - 1] * len(values), 1 - PAIRED):
        figure = f"{_tau(short)}, expected {expected_tau:.2f}"
        return [
            EndpointFinding(
                name="acceptance below what was expected",
                figure=figure,
                causes=_by_loss(kind, 1 - fmean(values) / (expected_tau - 1)),
            )
        ]
    return []


def _below_baseline(kind: ServerKind, short: ProbeGroup, baseline: ProbeGroup) -> EndpointFinding | None:
    is_first = is_first_compared(short, baseline)
    loss = paired_loss(short.values(is_first=is_first), baseline.values(is_first=is_first), PAIRED)
    if loss is None:
        return None
    texts = {sample.prompt: sample.text for sample in baseline.samples}
    same = sum(texts.get(sample.prompt) == sample.text for sample in short.samples)
    figure = (
        f"{_tau(short)}, {_tau(baseline)} in the baseline: {loss:.0%} fewer drafts accepted on the same prompts;"
        f" {same} of {len(short.samples)} answers are the same"
    )
    found = _by_loss(kind, loss)
    if same < len(short.samples) / 2:  # then it is not the drafter alone
        found = causes(kind, "template", "pair") + found
    return EndpointFinding(name="acceptance below the baseline", figure=figure, causes=found)


def _by_loss(kind: ServerKind, loss: float) -> list[Cause]:
    if loss < MILD:
        return causes(kind, "k_norm", "taps", "scales", "pair", "template")
    if loss < SEVERE:
        return causes(kind, "taps", "k_norm", "scales", "head", "template", "pair")
    return causes(kind, "scales", "taps", "k_norm", "head", "pair")


def long_contexts(
    kind: ServerKind, short: ProbeGroup, long: ProbeGroup, baseline: ProbeGroup | None
) -> list[EndpointFinding]:
    """Acceptance that dies at long contexts, and not at short ones."""
    is_first = is_first_compared(short, long)
    values, reference = (list(each.values(is_first=is_first).values()) for each in (long, short))
    lengths = [sample.input_tokens for sample in long.samples if sample.input_tokens]
    size = f"at {min(lengths)} to {max(lengths)} tokens" if lengths else "at long contexts"
    loss = None
    if baseline is not None:
        is_first = is_first_compared(long, baseline)
        loss = paired_loss(long.values(is_first=is_first), baseline.values(is_first=is_first), PAIRED)
    if is_share_below(values, reference, COLLAPSED):
        figure = f"{_tau(long)} {size}, {_tau(short)} at short ones; {_dead_from(long)}"
        return [
            EndpointFinding(
                name="acceptance collapses at long contexts",
                figure=figure,
                causes=causes(kind, "window", "rope", "prefix"),
            )
        ]
    if loss is not None:
        figure = f"{_tau(long)} {size}, {_tau(baseline)} in the baseline: {loss:.0%} fewer drafts accepted"
        return [
            EndpointFinding(
                name="acceptance at long contexts below the baseline",
                figure=figure,
                causes=causes(kind, "window", "rope", "prefix", "scales"),
            )
        ]
    return []


def repeated_prefixes(kind: ServerKind, first: ProbeGroup, again: ProbeGroup) -> list[EndpointFinding]:
    """Acceptance that falls where a prompt is known to a prefix cache."""
    is_first = is_first_compared(first, again)
    loss = paired_loss(again.values(is_first=is_first), first.values(is_first=is_first), PAIRED)
    if loss is None:
        return []
    cached = sum(sample.cached_tokens or 0 for sample in again.samples)
    hits = f"; {cached} of its tokens came from the cache" if cached else ""
    figure = f"{_tau(first)} the first time, {_tau(again)} the second: {loss:.0%} fewer drafts accepted{hits}"
    return [EndpointFinding(name="acceptance falls on a repeated prefix", figure=figure, causes=causes(kind, "prefix"))]


def temperature(kind: ServerKind, one: ProbeGroup, other: ProbeGroup) -> list[EndpointFinding]:
    """Temperature 1 that is greedy."""
    texts = {sample.prompt: sample.text for sample in one.samples}
    pairs = [(texts[sample.prompt], sample.text) for sample in other.samples if sample.prompt in texts]
    long_enough = [sample.output_tokens >= 8 for sample in other.samples]
    if len(pairs) >= MIN_SAMPLES and all(long_enough) and all(left == right for left, right in pairs):
        figure = f"{len(pairs)} of {len(pairs)} answers at temperature 1 are the same for two seeds"
        return [EndpointFinding(name="temperature ignored", figure=figure, causes=causes(kind, "temperature"))]
    return []


def sampled_acceptance(kind: ServerKind, drawn: ProbeGroup, baseline: ProbeGroup | None) -> list[EndpointFinding]:
    """Fewer drafts accepted at temperature 1 than in a healthy run of the same seed."""
    if baseline is None:
        return []
    is_first = is_first_compared(drawn, baseline)
    loss = paired_loss(drawn.values(is_first=is_first), baseline.values(is_first=is_first), SAMPLED)
    if loss is None:
        return []
    figure = f"{_tau(drawn)} at temperature 1, {_tau(baseline)} in the baseline: {loss:.0%} fewer drafts accepted"
    found = causes(kind, "independent", "prefix")
    return [EndpointFinding(name="acceptance when sampling below the baseline", figure=figure, causes=found)]


def lossless(kind: ServerKind, short: ProbeGroup, plain: ProbeGroup) -> list[EndpointFinding]:
    """Greedy texts that are not plain decoding's."""
    texts = {sample.prompt: sample.text for sample in short.samples}
    pairs = [(texts[sample.prompt], sample.text) for sample in plain.samples if sample.prompt in texts]
    differing = sum(left != right for left, right in pairs)
    if not differing:
        return []
    figure = f"{differing} of {len(pairs)} greedy answers differ from plain decoding's"
    return [EndpointFinding(name="text differs from plain decoding", figure=figure, causes=causes(kind, "numerics"))]


def load(kind: ServerKind, speeds: list[Speed]) -> list[EndpointFinding]:
    """Slower with drafts than without."""
    found = []
    for concurrency in (1, BATCH):
        rates = {speed.draft_length: speed.tokens_per_second for speed in speeds if speed.concurrency == concurrency}
        drafted, plain = rates.get(None, []), rates.get(0, [])
        if is_ratio_below(drafted, plain, SLOWER):
            best = max(rates, key=lambda length: fmean(rates[length]))
            figure = (
                f"{concurrency} at a time: {fmean(drafted):.0f} tokens/s with drafts, {fmean(plain):.0f} without;"
                f" best with a draft length of {'the server choice' if best is None else best}"
            )
            found.append(
                EndpointFinding(name="slower than plain decoding", figure=figure, causes=causes(kind, "batch"))
            )
    return found


def notes(
    kind: ServerKind, short: ProbeGroup, drawn: ProbeGroup, foreign: ProbeGroup, thinking: tuple[ProbeGroup, ProbeGroup]
) -> list[EndpointFinding]:
    """What is worth knowing, and wrong only for who expects otherwise."""
    found = []
    if is_share_below(*_values(foreign, short), 0.5):
        figure = f"{_tau(foreign)} in other languages, {_tau(short)} in English"
        found.append(
            EndpointFinding(name="other languages are drafted worse", figure=figure, causes=causes(kind, "language"))
        )
    if is_share_below(*_values(drawn, short), COLLAPSED):
        figure = f"{_tau(drawn)} at temperature 1, {_tau(short)} at 0"
        name = "few drafts are accepted when sampling"
        found.append(EndpointFinding(name=name, figure=figure, causes=causes(kind, "independent")))
    for one, other in (thinking, thinking[::-1]):
        if is_share_below(*_values(one, other), 0.5):
            figure = f"{_tau(one)} with {one.name}, {_tau(other)} with {other.name}"
            name = f"drafted worse with {one.name}"
            found.append(EndpointFinding(name=name, figure=figure, causes=causes(kind, "thinking")))
    # Where a server verifies fewer drafts at times, a late position's share says less about the draft than about that.
    is_whole = (short.draft_length or 0) > 0.9 * len(short.shares_by_position)
    shares = short.shares_by_position if is_whole else []
    worth = next((i for i, share in enumerate(shares) if share < RARE), len(shares))
    if worth < len(shares):
        figure = f"draft {worth + 1} of {len(shares)} is accepted in {shares[worth]:.0%} of passes"
        found.append(EndpointFinding(name="drafts that seldom pay", figure=figure, causes=causes(kind, "length")))
    return found


def prefix_hits(kind: ServerKind, again: ProbeGroup, hits: int | None) -> list[EndpointFinding]:
    """A prefix cache that is on and finds nothing; `hits`: tokens, None where the server does not say."""
    if hits != 0 or any(sample.cached_tokens for sample in again.samples) or not again.samples:
        return []
    figure = f"0 tokens from the prefix cache for {len(again.samples)} prompts that it had seen"
    return [EndpointFinding(name="prefix cache without hits", figure=figure, causes=causes(kind, "prefix hits"))]


def _values(one: ProbeGroup, other: ProbeGroup) -> tuple[list[float], list[float]]:
    is_first = is_first_compared(one, other)
    return list(one.values(is_first=is_first).values()), list(other.values(is_first=is_first).values())


def _tau(group: ProbeGroup | None) -> str:
    tau = None if group is None else group.tau_of_drafting_passes
    return "no tau" if tau is None else f"tau of drafting passes {tau:.2f}"


def _dead_from(group: ProbeGroup) -> str:
    """From which position on drafts are not accepted any more."""
    shares = group.shares_by_position
    first = next((index for index, share in enumerate(shares) if share < 0.01), None)
    return "all positions suffer" if first is None else f"no draft is accepted after position {first}"
