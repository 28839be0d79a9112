# SPDX-License-Identifier: Apache-2.0
"""Finds faults in the groups of a diagnosis, and names their causes (causes.json); pure functions.

A client sees acceptance, no layers: where several causes look alike, all are named, the likeliest first.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import fmean

import msgspec

from dflash_trt.api.acceptance import NEAR_ZERO_TAU, POOREST_TAU
from dflash_trt.files.json_file import package_data
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
from dflash_trt.observe.diagnosis.published_tau import PublishedTau, published_taus
from dflash_trt.observe.endpoints.identify import ServerKind

NEAR_ZERO = NEAR_ZERO_TAU - 1
POOREST, POOREST_SHARE = POOREST_TAU - 1, 0.4
"""Accepted drafts a pass of the poorest healthy uses, and of each draft where there are only one or two."""
PUBLISHED = 0.75
"""Share of a pair's lowest published acceptance, on others' prompts, below which a server's is too low."""
COLLAPSED = 0.2
"""Share of the short prompts' accepted drafts below which long contexts, or temperature 1, have collapsed."""
PAIRED = 0.05
"""The smallest loss of accepted drafts on the same prompts that is reported."""
SAMPLED = 0.5
"""The smallest reported loss at temperature 1, where a seed's text and so its acceptance may vary."""
MILD, SEVERE = 0.25, 0.5
"""Losses of accepted drafts that make other causes likelier."""
SLOWER = 0.75
"""Share of plain decoding's speed below which drafts cost time; smaller differences vary with the load."""
MIN_DRAWN = 8
"""Tokens of an answer that two seeds seldom draw alike."""
RARE = 0.1
"""Acceptance at a position below which a draft is seldom worth its verification."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A likely cause, for the runtime that was asked."""

    name: str
    what: str
    source: str
    setting: str


class CauseEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cause, for every runtime."""

    what: str
    source: str
    setting: str
    """For runtimes that are not in `settings`."""
    settings: dict[ServerKind, str] = {}


@cache
def cause_entries() -> dict[str, CauseEntry]:
    return package_data(Path(__file__).with_name("causes.json"), dict[str, CauseEntry])


def causes(kind: ServerKind, *names: str) -> list[Cause]:
    entries = [(name, cause_entries()[name]) for name in names]
    return [Cause(name=n, what=e.what, source=e.source, setting=e.settings.get(kind, e.setting)) for n, e in entries]


class EndpointFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, or a fact worth knowing."""

    name: str
    figure: str
    causes: list[Cause]
    """Likely ones, in this order."""


def not_seen(kind: ServerKind, short: ProbeGroup, unreadable: str, how: str) -> list[EndpointFinding]:
    """Missing answers, and acceptance that the server does not publish or that cannot be read."""
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
    """No drafts, drafts that are all rejected, or fewer accepted than in a healthy run or for a published pair."""
    if found := no_drafts(kind, short, "no drafts", "no drafter"):
        return found
    values = list(short.values(is_first=False).values())
    if len(values) >= MIN_SAMPLES and upper_bound(values) < NEAR_ZERO:
        figure = f"{_tau(short)}: nearly every draft is rejected"
        names: tuple[str, ...] = (
            "layout", "pairing", "scales", "projections", "cache", "taps", "head", "k_norm", "block", "pair",
        )  # fmt: skip
        return [finding(kind, "acceptance near zero", figure, *names)]
    if baseline is not None and (found := _below_baseline(kind, short, baseline)):
        return found
    if expected_tau is not None and values and is_share_below(values, [expected_tau - 1] * len(values), 1 - PAIRED):
        figure = f"{_tau(short)}, expected {expected_tau:.2f}"
        names = _by_loss(1 - fmean(values) / (expected_tau - 1))
        return [finding(kind, "acceptance below what was expected", figure, *names)]
    if expected_tau is not None or baseline is not None:
        return []
    if published and is_share_below(values, [published.lowest - 1] * len(values), PUBLISHED):
        figure = f"{_tau(short)}, published {published_range(published)}"
        return [finding(kind, "acceptance below what is published", figure, *_by_position(short))]
    most = min(POOREST, POOREST_SHARE * (draft_length or short.draft_length or 1))
    if len(values) >= MIN_SAMPLES and upper_bound(values) < most:
        figure = f"{_tau(short)}, where the poorest healthy uses of DFlash have {1 + most:.1f}"
        return [finding(kind, "acceptance low", figure, *_by_position(short))]
    return []


def in_doubt(
    kind: ServerKind, short: ProbeGroup, baseline: ProbeGroup | None, expected_tau: float | None,
    published: PublishedTau | None,
) -> list[EndpointFinding]:  # fmt: skip
    """Acceptance that is low, and scatters too much to say so beyond doubt: it is not fine either."""
    values = list(short.values(is_first=False).values())
    if baseline is not None:
        (values, usual), share = _values(short, baseline), 1 - MILD
    elif expected_tau is not None:
        usual, share = [expected_tau - 1], 1 - MILD
    else:
        usual, share = [] if published is None else [published.lowest - 1], PUBLISHED
    if not values or not usual or fmean(values) >= share * fmean(usual):
        return []
    against = _tau(baseline) if baseline else f"{1 + fmean(usual):.2f}"
    figure = f"{_tau(short)}, {against} to compare it with: {len(values)} answers scatter too much to tell"
    return [finding(kind, "acceptance in doubt", figure, *_by_position(short))]


def published_range(published: PublishedTau) -> str:
    """'2.70 (MT-Bench) to 3.30 for 3 drafts with openai/gpt-oss-120b, card of z-lab/gpt-oss-120b-DFlash'."""
    return (
        f"{published.lowest:.2f} ({published.prompts}) to {published.highest:.2f} for {published.num_draft_tokens}"
        f" drafts with {published.target}, {published.source}"
    )


def _by_position(short: ProbeGroup) -> tuple[str, ...]:
    """Likely causes of acceptance that is low everywhere; the last positions of a block too long are never accepted."""
    shares = short.shares_by_position
    rest = ("template", "layout", "pairing", "taps", "scales", "projections", "cache", "k_norm", "head", "pair")
    is_cut = len(shares) > 1 and shares[-1] < 0.005 and shares[0] < 0.5
    return ("block", *rest) if is_cut else (*rest, "block")


def not_judged(kind: ServerKind, short: ProbeGroup, draft_length: float) -> list[EndpointFinding]:
    """Acceptance without a figure to compare with; other targets' are named, of drafts as long."""
    fitting = [pair for pair in published_taus() if pair.num_draft_tokens <= draft_length + 0.5]
    longest = max((pair.num_draft_tokens for pair in fitting), default=0)
    others = [pair for pair in fitting if pair.num_draft_tokens == longest]
    figure = f"{_tau(short)}, and nothing to compare it with"
    if others:
        lowest, highest = min(pair.lowest for pair in others), max(pair.highest for pair in others)
        figure += f"; other targets with {longest} drafts have {lowest:.2f} to {highest:.2f}. If the card of your draft"
        figure += " says more, the other causes follow"
    return [finding(kind, "acceptance not judged", figure, "reference", *_by_position(short))]


def _below_baseline(kind: ServerKind, short: ProbeGroup, baseline: ProbeGroup) -> list[EndpointFinding]:
    if (loss := _paired_loss(short, baseline)) is None:
        return []
    same = sum(left == right for left, right in _text_pairs(short, baseline))
    figure = (
        f"{_tau(short)}, {_tau(baseline)} in the baseline: {loss:.0%} fewer drafts accepted on the same prompts;"
        f" {same} of {len(short.samples)} answers are the same"
    )
    names = _by_loss(loss)
    if same < len(short.samples) / 2:  # then it is not the drafter alone
        names = ("template", "pair", *names)
    return [finding(kind, "acceptance below the baseline", figure, *names)]


def _by_loss(loss: float) -> tuple[str, ...]:
    if loss < MILD:
        return "k_norm", "taps", "scales", "cache", "template", "pair"
    if loss < SEVERE:
        return "taps", "k_norm", "scales", "cache", "head", "template", "pair"
    return "scales", "taps", "cache", "layout", "pairing", "projections", "k_norm", "head", "block", "pair"


def long_contexts(
    kind: ServerKind, short: ProbeGroup, long: ProbeGroup, baseline: ProbeGroup | None
) -> list[EndpointFinding]:
    """Acceptance that dies at long contexts, and not at short ones."""
    lengths = [sample.input_tokens for sample in long.samples if sample.input_tokens]
    size = f"at {min(lengths)} to {max(lengths)} tokens" if lengths else "at long contexts"
    if found := no_drafts(kind, long, "no drafts at long contexts", "no drafter"):
        return found
    names = ("window", "rope", "prefix")
    if is_share_below(*_values(long, short), COLLAPSED):
        figure = f"{_tau(long)} {size}, {_tau(short)} at short ones; {_dead_from(long)}"
        return [finding(kind, "acceptance collapses at long contexts", figure, *names)]
    if baseline is not None and (loss := _paired_loss(long, baseline)) is not None:
        figure = f"{_tau(long)} {size}, {_tau(baseline)} in the baseline: {loss:.0%} fewer drafts accepted"
        return [finding(kind, "acceptance at long contexts below the baseline", figure, *names, "scales")]
    return []


def repeated_prefixes(kind: ServerKind, first: ProbeGroup, again: ProbeGroup) -> list[EndpointFinding]:
    """Acceptance that falls where a prompt is known to a prefix cache."""
    if found := no_drafts(kind, again, "no drafts on a repeated prefix", "prefix"):
        return found
    if (loss := _paired_loss(again, first)) is None:
        return []
    cached = sum(sample.cached_tokens or 0 for sample in again.samples)
    hits = f"; {cached} of its tokens came from the cache" if cached else ""
    figure = f"{_tau(first)} the first time, {_tau(again)} the second: {loss:.0%} fewer drafts accepted{hits}"
    return [finding(kind, "acceptance falls on a repeated prefix", figure, "prefix")]


def is_drawn(first: ProbeGroup, second: ProbeGroup) -> bool:
    """Whether an answer differs between two seeds, however short it is."""
    return any(left != right for left, right in _text_pairs(second, first))


def temperature(kind: ServerKind, first: ProbeGroup, second: ProbeGroup) -> list[EndpointFinding]:
    """Temperature 1 that is greedy."""
    pairs = _text_pairs(second, first)
    is_long = all(sample.output_tokens >= MIN_DRAWN for sample in second.samples)
    if len(pairs) >= MIN_SAMPLES and is_long and all(left == right for left, right in pairs):
        figure = f"{len(pairs)} of {len(pairs)} answers at temperature 1 are the same for two seeds"
        return [finding(kind, "temperature ignored", figure, "temperature")]
    return []


def sampled_acceptance(kind: ServerKind, drawn: ProbeGroup, baseline: ProbeGroup | None) -> list[EndpointFinding]:
    """Fewer drafts accepted at temperature 1 than in a healthy run of the same seed."""
    if baseline is None or (loss := _paired_loss(drawn, baseline, SAMPLED)) is None:
        return []
    figure = f"{_tau(drawn)} at temperature 1, {_tau(baseline)} in the baseline: {loss:.0%} fewer drafts accepted"
    return [finding(kind, "acceptance when sampling below the baseline", figure, "independent", "prefix")]


def lossless(kind: ServerKind, short: ProbeGroup, plain: ProbeGroup) -> list[EndpointFinding]:
    """Greedy texts that are not plain decoding's."""
    pairs = _text_pairs(plain, short)
    differing = sum(left != right for left, right in pairs)
    if not differing:
        return []
    figure = f"{differing} of {len(pairs)} greedy answers differ from plain decoding's"
    return [finding(kind, "text differs from plain decoding", figure, "numerics")]


def load(kind: ServerKind, speeds: list[Speed]) -> list[EndpointFinding]:
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


def notes(
    kind: ServerKind, short: ProbeGroup, drawn: ProbeGroup, foreign: ProbeGroup, thinking: tuple[ProbeGroup, ProbeGroup]
) -> list[EndpointFinding]:
    """Facts worth knowing that are faults only for some uses."""
    compared = [
        (foreign, "in other languages", short, "in English", 0.5, "other languages are drafted worse", "language"),
        (drawn, "at temperature 1", short, "at 0", COLLAPSED, "few drafts are accepted when sampling", "independent"),
        *((w, f"with {w.name}", b, f"with {b.name}", 0.5, f"drafted worse with {w.name}", "thinking")
          for w, b in (thinking, thinking[::-1])),
    ]  # fmt: skip
    findings = [
        finding(kind, name, f"{_tau(worse)} {where}, {_tau(better)} {usually}", cause)
        for worse, where, better, usually, share, name, cause in compared
        if is_share_below(*_values(worse, better), share)
    ]
    # Where a server verifies fewer drafts at times, a late position's share says less about the draft than about that.
    is_whole = (short.draft_length or 0) > 0.9 * len(short.shares_by_position)
    shares = short.shares_by_position if is_whole else []
    worth = next((i for i, share in enumerate(shares) if share < RARE), len(shares))
    if worth < len(shares):
        figure = f"draft {worth + 1} of {len(shares)} is accepted in {shares[worth]:.0%} of passes"
        findings.append(finding(kind, "drafts that seldom pay", figure, "length"))
    return findings


def prefix_hits(kind: ServerKind, again: ProbeGroup, hits: int | None) -> list[EndpointFinding]:
    """A prefix cache that is on and finds nothing; `hits`: tokens, None where the server does not say."""
    if hits != 0 or any(sample.cached_tokens for sample in again.samples) or not again.samples:
        return []
    figure = f"0 tokens from the prefix cache for {len(again.samples)} prompts that it had seen"
    return [finding(kind, "prefix cache without hits", figure, "prefix hits")]


def finding(kind: ServerKind, name: str, figure: str, *cause_names: str) -> EndpointFinding:
    """A finding with the causes of `cause_names`, for the runtime that was asked."""
    return EndpointFinding(name=name, figure=figure, causes=causes(kind, *cause_names))


def _comparable(group: ProbeGroup, reference: ProbeGroup) -> tuple[dict[str, float], dict[str, float]]:
    is_first = is_first_compared(group, reference)
    return group.values(is_first=is_first), reference.values(is_first=is_first)


def _values(group: ProbeGroup, reference: ProbeGroup) -> tuple[list[float], list[float]]:
    after, before = _comparable(group, reference)
    return list(after.values()), list(before.values())


def _paired_loss(group: ProbeGroup, reference: ProbeGroup, smallest: float = PAIRED) -> float | None:
    """Share of accepted drafts lost on the same prompts; None if that is noise or small."""
    return paired_loss(*_comparable(group, reference), smallest)


def _text_pairs(group: ProbeGroup, reference: ProbeGroup) -> list[tuple[str, str]]:
    """Both answers to each prompt that both were asked."""
    texts = {sample.prompt: sample.text for sample in reference.samples}
    return [(texts[sample.prompt], sample.text) for sample in group.samples if sample.prompt in texts]


def _tau(group: ProbeGroup | None) -> str:
    tau = None if group is None else group.tau_of_drafting_passes
    return "no tau" if tau is None else f"tau of drafting passes {tau:.2f}"


def _dead_from(group: ProbeGroup) -> str:
    """From which position on drafts are not accepted any more."""
    shares = group.shares_by_position
    first = next((index for index, share in enumerate(shares) if share < 0.01), None)
    return "all positions suffer" if first is None else f"no draft is accepted after position {first}"
