# SPDX-License-Identifier: Apache-2.0
"""Finds acceptance that is missing, low or in doubt at short prompts; pure functions.

A client sees acceptance but no layers: if several causes look alike, all are named, the likeliest first.
"""

from __future__ import annotations

from statistics import fmean

from dflash_trt.api.acceptance import NEAR_ZERO_TAU, POOREST_TAU
from dflash_trt.observe.diagnosis.checks import EndpointFinding, finding
from dflash_trt.observe.diagnosis.noise import (
    MIN_SAMPLES,
    PAIRED,
    comparable_values,
    is_first_compared,
    is_share_below,
    loss_on_same_prompts,
    tau_text,
    text_pairs,
    upper_bound,
)
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.diagnosis.published_tau import PublishedTau, published_taus
from dflash_trt.observe.endpoints.identify import ServerKind

NEAR_ZERO = NEAR_ZERO_TAU - 1
POOREST, POOREST_SHARE = POOREST_TAU - 1, 0.4
"""Accepted draft tokens per pass of the poorest healthy uses, and per draft token if there are only one or two."""
PUBLISHED = 0.75
"""Share of a pair's lowest published acceptance, with other prompts, below which a server's is too low."""
MILD, SEVERE = 0.25, 0.5
"""Losses of accepted draft tokens beyond which other causes are likelier."""


def not_seen(kind: ServerKind, short: ProbeGroup, unreadable: str, how: str) -> list[EndpointFinding]:
    """Missing answers, and acceptance that the server does not publish or that is unreadable."""
    if len(short.samples) < MIN_SAMPLES:
        figure = f"{len(short.samples)} short prompts were answered: {short.why_not or 'no more were asked'}"
        return [finding(kind, "too few answers", figure, "slow")]
    if unreadable:
        return [finding(kind, "metrics cannot be read", unreadable, "metrics")]
    if not any(sample.acceptance or sample.tau_of_drafting_passes for sample in short.samples):
        return [finding(kind, "acceptance not measured", how, "unpublished", "no drafter")]
    return []


def no_drafts(kind: ServerKind, group: ProbeGroup, name: str, *cause_names: str) -> list[EndpointFinding]:
    """Answers in most of which no draft was verified."""
    drafting = [sample.acceptance.drafting_passes for sample in group.samples if sample.acceptance is not None]
    idle = sum(not passes for passes in drafting)
    if not drafting or 2 * idle <= len(drafting):
        return []
    figure = f"{idle} of {len(drafting)} requests ({group.name}) were answered without one verified draft"
    return [finding(kind, name, figure, *cause_names)]


def low_acceptance(
    kind: ServerKind, short: ProbeGroup, baseline: ProbeGroup | None, expected_tau: float | None,
    published: PublishedTau | None = None, draft_length: float | None = None,
) -> list[EndpointFinding]:  # fmt: skip
    """No drafts, only rejected drafts, or fewer accepted ones than in a healthy run or for a published pair."""
    if found := no_drafts(kind, short, "no drafts", "no drafter"):
        return found
    values = short.pooled_values
    if len(values) >= MIN_SAMPLES and upper_bound(values) < NEAR_ZERO:
        return [near_zero(kind, tau_text(short))]
    if baseline is not None and (found := _below_baseline(kind, short, baseline)):
        return found
    if expected_tau is not None and values and is_share_below(values, [expected_tau - 1] * len(values), 1 - PAIRED):
        figure = f"{tau_text(short)}, expected {expected_tau:.2f}"
        names = _by_loss(1 - fmean(values) / (expected_tau - 1))
        return [finding(kind, "acceptance below what was expected", figure, *names)]
    if expected_tau is not None or baseline is not None:
        return []
    if published and is_share_below(values, [published.lowest - 1] * len(values), PUBLISHED):
        figure = f"{tau_text(short)}, published {published_range(published)}"
        return [finding(kind, "acceptance below what is published", figure, *_by_position(short))]
    most = min(POOREST, POOREST_SHARE * (draft_length or short.draft_length or 1))
    if len(values) >= MIN_SAMPLES and upper_bound(values) < most:
        figure = f"{tau_text(short)}, below the lowest published for DFlash, {1 + most:.1f}"
        return [finding(kind, "acceptance low", figure, *_by_position(short))]
    return []


def near_zero(kind: ServerKind, tau: str) -> EndpointFinding:
    """The finding for a server that rejects nearly every draft; `tau` is its acceptance length, in words."""
    names = ("layout", "pairing", "scales", "projections", "cache", "taps", "head", "k_norm", "block", "pair")
    return finding(kind, "acceptance near zero", f"{tau}: nearly every draft is rejected", *names)


def in_doubt(
    kind: ServerKind, short: ProbeGroup, baseline: ProbeGroup | None, expected_tau: float | None,
    published: PublishedTau | None,
) -> list[EndpointFinding]:  # fmt: skip
    """Acceptance that is low but too noisy for certainty: it is not fine either."""
    values = short.pooled_values
    if baseline is not None:
        share, usual = 1 - MILD, baseline.pooled_values
        if is_first_compared(short, baseline):
            values, usual = comparable_values(short, baseline)
    elif expected_tau is not None:
        usual, share = [expected_tau - 1], 1 - MILD
    else:
        usual, share = [] if published is None else [published.lowest - 1], PUBLISHED
    if not values or not usual or fmean(values) >= share * fmean(usual):
        return []
    against = tau_text(baseline) if baseline else f"{1 + fmean(usual):.2f}"
    figure = f"{tau_text(short)}, {against} to compare it with: {len(values)} answers scatter too much to tell"
    return [finding(kind, "acceptance in doubt", figure, *_by_position(short))]


def published_range(published: PublishedTau) -> str:
    """'2.7 (MT-Bench) to 3.3 (GSM8K) for 3 drafts, card of z-lab/gpt-oss-120b-DFlash, with openai/gpt-oss-120b'."""
    return f"{published}, with {published.target}"


def _by_position(short: ProbeGroup) -> tuple[str, ...]:
    """Likely causes of acceptance that is low everywhere; the last positions of a block that is too long are never
    accepted.
    """
    shares = short.shares_by_position
    rest = ("template", "layout", "pairing", "taps", "scales", "projections", "cache", "k_norm", "head", "pair")
    is_cut = len(shares) > 1 and shares[-1] < 0.005 and shares[0] < 0.5
    return ("block", *rest) if is_cut else (*rest, "block")


def not_judged(kind: ServerKind, short: ProbeGroup, draft_length: float) -> list[EndpointFinding]:
    """Acceptance without a figure to compare with; names other targets' with equally long drafts."""
    fitting = [pair for pair in published_taus() if pair.num_draft_tokens <= draft_length + 0.5]
    longest = max((pair.num_draft_tokens for pair in fitting), default=0)
    others = [pair for pair in fitting if pair.num_draft_tokens == longest]
    figure = f"{tau_text(short)}, and nothing to compare it with"
    if others:
        lowest, highest = min(pair.lowest for pair in others), max(pair.highest for pair in others)
        figure += f"; other targets with {longest} drafts have {lowest:.2f} to {highest:.2f}. If the card of your draft"
        figure += " says more, the other causes follow"
    return [finding(kind, "acceptance not judged", figure, "reference", *_by_position(short))]


def _below_baseline(kind: ServerKind, short: ProbeGroup, baseline: ProbeGroup) -> list[EndpointFinding]:
    if (loss := loss_on_same_prompts(short, baseline)) is None:
        return []
    same = sum(left == right for left, right in text_pairs(short, baseline))
    figure = (
        f"{tau_text(short)}, {tau_text(baseline)} in the baseline: {loss:.0%} fewer drafts accepted on the same"
        f" prompts; {same} of {len(short.samples)} answers are the same"
    )
    names = _by_loss(loss)
    if same < len(short.samples) / 2:  # then it is not only the drafter
        names = ("template", "pair", *names)
    return [finding(kind, "acceptance below the baseline", figure, *names)]


def _by_loss(loss: float) -> tuple[str, ...]:
    if loss < MILD:
        return "k_norm", "taps", "scales", "cache", "template", "pair"
    if loss < SEVERE:
        return "taps", "k_norm", "scales", "cache", "head", "template", "pair"
    return "scales", "taps", "cache", "layout", "pairing", "projections", "k_norm", "head", "block", "pair"
