# SPDX-License-Identifier: Apache-2.0
"""Findings from counts, and bounds of noise by hand: what each fault looks like, and what is none."""

from __future__ import annotations

import math
import random
from typing import get_args

import pytest

from dflash_trt.observe.diagnosis import judge
from dflash_trt.observe.diagnosis.judge import EndpointFinding, cause_entries, causes
from dflash_trt.observe.diagnosis.noise import is_first_compared, is_share_below, paired_loss, upper_bound
from dflash_trt.observe.diagnosis.probe_answers import ProbeAnswer, ProbeGroup
from dflash_trt.observe.diagnosis.probes import Speed
from dflash_trt.observe.endpoints.identify import ServerKind
from dflash_trt.observe.endpoints.observed_acceptance import drafting
from tests.observe.diagnosis.samples import group


def test_upper_bound_by_hand() -> None:
    # mean 2.5, variance 5/3, error sqrt(5/12), t(3) = 12.92
    assert upper_bound([1, 2, 3, 4]) == pytest.approx(2.5 + 12.92 * math.sqrt(5 / 12))
    assert upper_bound([1, 1, 1]) == math.inf


def test_paired_loss_by_hand() -> None:
    before = {"a": 2.0, "b": 1.0, "c": 3.0, "d": 2.0}
    after = {name: value * 0.9 for name, value in before.items()}
    # 2 * -0.1 / 1.9 for each: no scatter
    assert paired_loss(after, before, 0.05) == pytest.approx(0.1)
    assert paired_loss(after, before, 0.11) is None
    assert paired_loss(before, after, 0.05) is None
    assert paired_loss({"a": 0.0}, before, 0.05) is None
    # -.105 -.182 -.069 -.105: mean -.1155, error .0477 / 2, t(3) * error = .308: noise
    assert paired_loss({name: value - 0.2 for name, value in before.items()}, before, 0.05) is None


def test_a_collapse_is_seen_beside_an_easy_prompt() -> None:
    """Figures measured with a prefix cache that loses features: the mean of plain differences scatters too much."""
    before = dict(zip("abcdefgh", (0.64, 0.52, 0.24, 0.39, 0.18, 0.21, 2.36, 0.64), strict=True))
    after = dict.fromkeys(before, 0.0) | {"g": 0.02}
    assert paired_loss(after, before, 0.05) == pytest.approx(1 - 0.02 / 5.18)
    assert paired_loss(dict.fromkeys(before, 0.0), dict.fromkeys(before, 0.0), 0.05) is None


def test_noise_is_no_finding() -> None:
    """Two of 4000 comparisons of equals would be expected at 99.95 %."""
    generator = random.Random(0)
    found = 0
    for _ in range(4000):
        one, other = ([generator.gauss(2, 0.5) for _ in range(12)] for _ in range(2))
        names = [str(index) for index in range(12)]
        found += paired_loss(dict(zip(names, one, strict=True)), dict(zip(names, other, strict=True)), 0) is not None
    assert found <= 8


def test_share_below() -> None:
    reference = [1.5, 1.6, 1.4, 1.5, 1.6, 1.4]
    assert is_share_below([0.05, 0.06, 0.04, 0.05], reference, 0.2)
    assert not is_share_below([0.28, 0.3, 0.26, 0.29], reference, 0.2)
    assert not is_share_below([0.0, 0.1, 0.5, 0.0], reference, 0.2)  # below on average, and too noisy to say so
    assert not is_share_below([0.0, 0.0, 0.0], reference, 0.2)


def test_drafts_of_other_lengths_are_compared_by_the_first() -> None:
    assert not is_first_compared(group("a"), group("b"))
    assert is_first_compared(group("a"), group("b", draft_length=3))


OURS: ServerKind = "dflash-trt"
NO_DRAFTS = ProbeAnswer(prompt="a", text="t", output_tokens=9, seconds=1.0, acceptance=drafting(0, 0, 0))
UNPUBLISHED = ProbeAnswer(prompt="a", text="t", output_tokens=9, seconds=1.0)


def said(findings: list[EndpointFinding]) -> list[tuple[str, str]]:
    """Name and likeliest cause of each."""
    return [(finding.name, finding.causes[0].name) for finding in findings]


def test_a_healthy_server() -> None:
    short = group("short")
    assert judge.low_acceptance(OURS, short, None, None) == []
    assert judge.low_acceptance(OURS, short, group("short"), short.tau_of_drafting_passes) == []
    assert judge.long_contexts(OURS, short, group("long", 0.5, count=8), None) == []
    assert judge.long_contexts(OURS, short, group("long", 0.5, count=8), group("long", 0.5, count=8)) == []
    assert judge.repeated_prefixes(OURS, group("first", count=8), group("again", count=8)) == []
    assert judge.temperature(OURS, group("one", text="x", count=6), group("two", text="y", count=6)) == []
    assert judge.lossless(OURS, short, group("plain", count=6)) == []


@pytest.mark.parametrize("name", ["no drafts", "acceptance near zero"])
def test_nothing_is_accepted(name: str) -> None:
    short = ProbeGroup(name="short", samples=[NO_DRAFTS] * 4) if name == "no drafts" else group("short", 0.02)
    (finding,) = judge.low_acceptance("vllm", short, None, None)
    assert finding.name == name
    assert finding.causes[0].name in ("no drafter", "scales")


def test_what_is_not_published_is_not_judged() -> None:
    short = ProbeGroup(name="short", samples=[UNPUBLISHED] * 16)
    assert short.tau_of_drafting_passes is None
    assert judge.low_acceptance("unknown", short, short, 4.0) == []
    assert judge.long_contexts("unknown", short, short, None) == []
    assert judge.repeated_prefixes("unknown", short, short) == []
    assert judge.notes("unknown", short, short, short, (short, short)) == []


@pytest.mark.parametrize(("factor", "likeliest"), [(0.85, "k_norm"), (0.6, "taps"), (0.25, "scales")])
def test_below_the_baseline_the_loss_orders_the_causes(factor: float, likeliest: str) -> None:
    findings = judge.low_acceptance(OURS, group("short", factor), group("short"), None)
    assert said(findings) == [("acceptance below the baseline", likeliest)]
    assert {"k_norm", "taps", "scales"} <= {cause.name for cause in findings[0].causes}
    assert "16 of 16 answers are the same" in findings[0].figure
    other = judge.low_acceptance(OURS, group("short", 0.6, text="other"), group("short"), None)
    assert said(other) == [("acceptance below the baseline", "template")]


def test_below_what_was_expected() -> None:
    short = group("short", 0.6)
    assert said(judge.low_acceptance(OURS, short, None, 2.93)) == [("acceptance below what was expected", "taps")]
    assert judge.low_acceptance(OURS, short, None, short.tau_of_drafting_passes) == []


def test_a_window_that_is_ignored() -> None:
    long = group("long", 0.04, count=8, input_tokens=5000)
    (finding,) = judge.long_contexts("sglang", group("short"), long, None)
    assert (finding.name, finding.causes[0].name) == ("acceptance collapses at long contexts", "window")
    assert "at 5000 to 5000 tokens" in finding.figure
    assert "--speculative-draft-window-size" in finding.causes[0].setting
    findings = judge.long_contexts(OURS, group("short"), group("long", 0.5, count=8), group("long", 0.9, count=8))
    assert said(findings) == [("acceptance at long contexts below the baseline", "window")]


def test_features_that_a_prefix_cache_loses() -> None:
    again = group("again", 0.3, count=8, cached_tokens=448)
    (finding,) = judge.repeated_prefixes("tensorrt-llm", group("first", count=8), again)
    assert finding.causes[0].name == "prefix"
    assert "context_recompute_tail" in finding.causes[0].setting
    assert "3584 of its tokens came from the cache" in finding.figure


def test_texts_that_are_the_same_at_temperature_1_or_differ_at_0() -> None:
    one, other = group("one", count=6), group("two", count=6)
    assert said(judge.temperature(OURS, one, other)) == [("temperature ignored", "temperature")]
    assert judge.temperature(OURS, one, ProbeGroup(name="two", samples=other.samples[:3])) == []
    (finding,) = judge.lossless(OURS, group("short"), group("plain", text="other", count=6))
    assert finding.figure == "6 of 6 greedy answers differ from plain decoding's"


def test_sampling_below_the_baseline() -> None:
    found = judge.sampled_acceptance("vllm", group("one", 0.1, count=6), group("one", count=6))
    assert said(found) == [("acceptance when sampling below the baseline", "independent")]
    assert judge.sampled_acceptance("vllm", group("one", 0.1, count=6), None) == []


@pytest.mark.parametrize(("kind", "hits", "found"), [("vllm", 0, 1), ("vllm", 64, 0), ("vllm", None, 0)])
def test_a_prefix_cache_without_hits(kind: ServerKind, hits: int | None, found: int) -> None:
    assert len(judge.prefix_hits(kind, group("again", count=8), hits)) == found


def test_slower_than_plain_decoding() -> None:
    def speeds(*drafted: float) -> list[Speed]:
        rates = {None: list(drafted), 0: [100.0, 110.0, 105.0, 100.0, 105.0], 1: [120.0, 125.0, 118.0, 120.0, 120.0]}
        return [Speed(concurrency=16, draft_length=k, tokens_per_second=rate) for k, rate in rates.items()]

    (finding,) = judge.load(OURS, speeds(50.0, 55.0, 53.0, 49.0, 53.0))
    assert finding.figure == "16 at a time: 52 tokens/s with drafts, 104 without; best with a draft length of 1"
    assert judge.load(OURS, speeds(50.0, 25.0, 80.0, 20.0, 60.0)) == []  # a busy machine
    assert judge.load(OURS, speeds(90.0, 99.0, 95.0, 90.0, 95.0)) == []
    assert judge.load(OURS, speeds(50.0, 55.0, 53.0)) == []
    assert judge.load("vllm", speeds(50.0, 55.0, 53.0, 49.0, 53.0)[:1]) == []


def test_what_is_worth_knowing() -> None:
    short, drawn = group("short"), group("one", 0.05, count=6)
    thinking = group("thinking on", count=6), group("thinking off", 0.1, count=6)
    names = [finding.name for finding in judge.notes(OURS, short, drawn, group("languages", 0.2, count=6), thinking)]
    assert names == [
        "other languages are drafted worse",
        "few drafts are accepted when sampling",
        "drafted worse with thinking off",
        "drafts that seldom pay",
    ]
    shorter = group("short", draft_length=3)  # late positions were not always drafted: nothing to say about them
    assert judge.notes(OURS, shorter, shorter, shorter, (shorter, shorter)) == []


@pytest.mark.parametrize("kind", get_args(ServerKind))
def test_every_cause_has_a_source_and_a_setting(kind: ServerKind) -> None:
    for cause in causes(kind, *cause_entries()):
        assert cause.source.startswith("https://")
        assert cause.what
        assert cause.setting
