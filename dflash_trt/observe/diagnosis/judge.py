# SPDX-License-Identifier: Apache-2.0
"""Finds faults in the groups of a diagnosis, and names their causes (causes.json); pure functions.

A client sees acceptance, no layers: where several causes look alike, all are named, the likeliest first.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import fmean

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
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
"""Share of the short prompts' accepted drafts below which long contexts, or temperature 1, have collapsed."""
PAIRED = 0.05
"""The smallest loss of accepted drafts on the same prompts that is reported."""
SAMPLED = 0.5
"""The smallest reported loss at temperature 1, where a seed's text and so its acceptance may vary."""
MILD, SEVERE = 0.25, 0.5
"""Losses of accepted drafts that make other causes likelier."""
SLOWER = 0.75
"""Share of plain decoding's speed below which drafts cost time; smaller differences vary with the load."""
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
    return read_json(
        Path(__file__).with_name("causes.json"), dict[str, CauseEntry], ConfigError, what="the package's data"
    )


def causes(kind: ServerKind, *names: str) -> list[Cause]:
    entries = [(name, cause_entries()[name]) for name in names]
    return [Cause(name=n, what=e.what, source=e.source, setting=e.settings.get(kind, e.setting)) for n, e in entries]


class EndpointFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, or a fact worth knowing."""

    name: str
    figure: str
    causes: list[Cause]
    """Likely ones, in this order."""


def not_seen(kind: ServerKind, short: ProbeGroup, unreadable: str) -> list[EndpointFinding]:
    """Unreadable metrics and missing answers are findings, never health."""
    findings = []
    if unreadable:
        findings.append(_finding(kind, "metrics cannot be read", unreadable, "metrics"))
    if len(short.samples) < MIN_SAMPLES:
        figure = f"{len(short.samples)} short prompts were answered: {short.why_not or 'no more were asked'}"
        findings.append(_finding(kind, "too few answers", figure, "slow"))
    return findings


def low_acceptance(
    kind: ServerKind, short: ProbeGroup, baseline: ProbeGroup | None, expected_tau: float | None
) -> list[EndpointFinding]:
    """No drafts, drafts that are all rejected, or fewer accepted than in a healthy run."""
    drafting = [sample.acceptance.drafting_passes for sample in short.samples if sample.acceptance is not None]
    if drafting and not any(drafting):
        figure = f"{len(short.samples)} requests were answered without one verified draft"
        return [_finding(kind, "no drafts", figure, "no drafter")]
    values = list(short.values(is_first=False).values())
    if len(values) >= MIN_SAMPLES and upper_bound(values) < NEAR_ZERO:
        figure = f"{_tau(short)}: nearly every draft is rejected"
        return [_finding(kind, "acceptance near zero", figure, "scales", "taps", "head", "k_norm", "pair")]
    if baseline is not None and (finding := _below_baseline(kind, short, baseline)):
        return [finding]
    if expected_tau is not None and values and is_share_below(values, [expected_tau - 1] * len(values), 1 - PAIRED):
        figure = f"{_tau(short)}, expected {expected_tau:.2f}"
        names = _by_loss(1 - fmean(values) / (expected_tau - 1))
        return [_finding(kind, "acceptance below what was expected", figure, *names)]
    return []


def _below_baseline(kind: ServerKind, short: ProbeGroup, baseline: ProbeGroup) -> EndpointFinding | None:
    if (loss := _paired_loss(short, baseline)) is None:
        return None
    same = sum(left == right for left, right in _text_pairs(short, baseline))
    figure = (
        f"{_tau(short)}, {_tau(baseline)} in the baseline: {loss:.0%} fewer drafts accepted on the same prompts;"
        f" {same} of {len(short.samples)} answers are the same"
    )
    names = _by_loss(loss)
    if same < len(short.samples) / 2:  # then it is not the drafter alone
        names = ("template", "pair", *names)
    return _finding(kind, "acceptance below the baseline", figure, *names)


def _by_loss(loss: float) -> tuple[str, ...]:
    if loss < MILD:
        return "k_norm", "taps", "scales", "pair", "template"
    if loss < SEVERE:
        return "taps", "k_norm", "scales", "head", "template", "pair"
    return "scales", "taps", "k_norm", "head", "pair"


def long_contexts(
    kind: ServerKind, short: ProbeGroup, long: ProbeGroup, baseline: ProbeGroup | None
) -> list[EndpointFinding]:
    """Acceptance that dies at long contexts, and not at short ones."""
    lengths = [sample.input_tokens for sample in long.samples if sample.input_tokens]
    size = f"at {min(lengths)} to {max(lengths)} tokens" if lengths else "at long contexts"
    if is_share_below(*_values(long, short), COLLAPSED):
        figure = f"{_tau(long)} {size}, {_tau(short)} at short ones; {_dead_from(long)}"
        return [_finding(kind, "acceptance collapses at long contexts", figure, "window", "rope", "prefix")]
    if baseline is not None and (loss := _paired_loss(long, baseline)) is not None:
        figure = f"{_tau(long)} {size}, {_tau(baseline)} in the baseline: {loss:.0%} fewer drafts accepted"
        return [
            _finding(
                kind, "acceptance at long contexts below the baseline", figure, "window", "rope", "prefix", "scales"
            )
        ]
    return []


def repeated_prefixes(kind: ServerKind, first: ProbeGroup, again: ProbeGroup) -> list[EndpointFinding]:
    """Acceptance that falls where a prompt is known to a prefix cache."""
    if (loss := _paired_loss(again, first)) is None:
        return []
    cached = sum(sample.cached_tokens or 0 for sample in again.samples)
    hits = f"; {cached} of its tokens came from the cache" if cached else ""
    figure = f"{_tau(first)} the first time, {_tau(again)} the second: {loss:.0%} fewer drafts accepted{hits}"
    return [_finding(kind, "acceptance falls on a repeated prefix", figure, "prefix")]


def temperature(kind: ServerKind, first: ProbeGroup, second: ProbeGroup) -> list[EndpointFinding]:
    """Temperature 1 that is greedy."""
    pairs = _text_pairs(second, first)
    is_long = all(sample.output_tokens >= 8 for sample in second.samples)
    if len(pairs) >= MIN_SAMPLES and is_long and all(left == right for left, right in pairs):
        figure = f"{len(pairs)} of {len(pairs)} answers at temperature 1 are the same for two seeds"
        return [_finding(kind, "temperature ignored", figure, "temperature")]
    return []


def sampled_acceptance(kind: ServerKind, drawn: ProbeGroup, baseline: ProbeGroup | None) -> list[EndpointFinding]:
    """Fewer drafts accepted at temperature 1 than in a healthy run of the same seed."""
    if baseline is None or (loss := _paired_loss(drawn, baseline, SAMPLED)) is None:
        return []
    figure = f"{_tau(drawn)} at temperature 1, {_tau(baseline)} in the baseline: {loss:.0%} fewer drafts accepted"
    return [_finding(kind, "acceptance when sampling below the baseline", figure, "independent", "prefix")]


def lossless(kind: ServerKind, short: ProbeGroup, plain: ProbeGroup) -> list[EndpointFinding]:
    """Greedy texts that are not plain decoding's."""
    pairs = _text_pairs(plain, short)
    differing = sum(left != right for left, right in pairs)
    if not differing:
        return []
    figure = f"{differing} of {len(pairs)} greedy answers differ from plain decoding's"
    return [_finding(kind, "text differs from plain decoding", figure, "numerics")]


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
            findings.append(_finding(kind, "slower than plain decoding", figure, "batch"))
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
        _finding(kind, name, f"{_tau(worse)} {where}, {_tau(better)} {usually}", cause)
        for worse, where, better, usually, share, name, cause in compared
        if is_share_below(*_values(worse, better), share)
    ]
    # Where a server verifies fewer drafts at times, a late position's share says less about the draft than about that.
    is_whole = (short.draft_length or 0) > 0.9 * len(short.shares_by_position)
    shares = short.shares_by_position if is_whole else []
    worth = next((i for i, share in enumerate(shares) if share < RARE), len(shares))
    if worth < len(shares):
        figure = f"draft {worth + 1} of {len(shares)} is accepted in {shares[worth]:.0%} of passes"
        findings.append(_finding(kind, "drafts that seldom pay", figure, "length"))
    return findings


def prefix_hits(kind: ServerKind, again: ProbeGroup, hits: int | None) -> list[EndpointFinding]:
    """A prefix cache that is on and finds nothing; `hits`: tokens, None where the server does not say."""
    if hits != 0 or any(sample.cached_tokens for sample in again.samples) or not again.samples:
        return []
    figure = f"0 tokens from the prefix cache for {len(again.samples)} prompts that it had seen"
    return [_finding(kind, "prefix cache without hits", figure, "prefix hits")]


def _finding(kind: ServerKind, name: str, figure: str, *cause_names: str) -> EndpointFinding:
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
