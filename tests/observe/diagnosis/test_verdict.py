# SPDX-License-Identifier: Apache-2.0
"""Verdicts of `doctor URL`: servers that publish as the runtimes do, healthy, with one fault, or silent.

Nothing that was not measured is called fine, and a healthy server hears nothing, in twenty runs of each runtime.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

import msgspec
import pytest

from dflash_trt.observe.diagnosis.checks import Verdict, cause_entries
from dflash_trt.observe.diagnosis.diagnosis import Diagnosis, diagnose
from dflash_trt.observe.diagnosis.diagnosis_tables import conclusion
from dflash_trt.observe.diagnosis.judge_acceptance import low_acceptance, no_drafts, not_judged, not_seen
from dflash_trt.observe.diagnosis.judge_parts import rejected_requests
from dflash_trt.observe.diagnosis.judge_uses import (
    drafting_notes,
    long_contexts,
    lossless,
    prefix_hits,
    repeated_prefixes,
    temperature,
)
from dflash_trt.observe.diagnosis.probe_answers import ProbeAnswer, ProbeGroup
from dflash_trt.observe.diagnosis.prober import OUT_OF_TIME
from dflash_trt.observe.diagnosis.probes import Probed
from dflash_trt.observe.diagnosis.published_tau import published_tau
from dflash_trt.observe.diagnosis.speed import NO_LOAD, NO_PLAIN, Speed, slow_drafts
from dflash_trt.observe.diagnosis.verdict import judged
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import Runtime
from dflash_trt.observe.endpoints.observed_acceptance import drafting
from dflash_trt.observe.traffic.judge_traffic import judge
from tests.observe.diagnosis.look_alikes import HEALTHY, LookAlike, running
from tests.observe.diagnosis.samples import group, sample
from tests.observe.traffic.pages import Engine
from tests.observe.traffic.test_traffic import traffic
from tests.paths import REPOSITORY

PAIR = "Qwen/Qwen3-8B"
KINDS = ("vllm", "sglang", "tensorrt-llm")
BLOCK_TOO_LONG = (0.181, 0.067, 0.039, 0.014, 0.009, 0, 0)  # vllm#41834: 7 drafts of a block of 5
HALF = (0.75, 0.5, 0.32, 0.2, 0.12, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01)  # llama.cpp#25792
OTHER_LAYOUT = (0.01,) * 7  # sglang#40144


def ask(kind: str, rates: Sequence[float], model: str = PAIR, **faults: Any) -> Diagnosis:
    with running(LookAlike(kind, rates, model=model, **faults)) as url, Client(url) as client:
        return diagnose(client, has_load=False)


def names(diagnosis: Diagnosis | Verdict) -> tuple[list[str], list[str]]:
    return [f.name for f in diagnosis.findings], [f.name for f in diagnosis.unmeasured]


@pytest.mark.parametrize(
    "kind", [kind if kind == "sglang" else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
)
def test_a_healthy_server_is_compared_with_its_published_figure(kind: str) -> None:
    found = ask(kind, HEALTHY)
    assert names(found) == ([], [])
    (acceptance, *_) = found.checks
    assert acceptance.verdict == "fine"
    assert (
        "against the published 4.24 (MT-Bench) to 8.01 (Math500) for 15 drafts, arXiv 2602.06036v2, with Qwen/Qwen3-8B"
        in acceptance.figure
    )
    assert conclusion(found.checks, found.findings) == "nothing wrong in 4 of 6 checks; not measured: lossless, speed"


@pytest.mark.parametrize("kind", ["tensorrt-llm", *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[:2])])
def test_acceptance_that_is_not_published_is_a_finding(kind: str) -> None:
    found = ask(kind, HEALTHY, publishes=False)
    assert names(found) == ([], ["acceptance not measured"])
    line = {"vllm": "--speculative-config", "sglang": "--enable-metrics", "tensorrt-llm": "return_perf_metrics: true"}
    assert line[kind] in found.unmeasured[0].causes[0].setting
    assert [check.verdict for check in found.checks[:3]] == ["not measured"] * 3


@pytest.mark.parametrize(
    ("kind", "rates", "model", "name", "likeliest"),
    [
        ("tensorrt-llm", [0.7 * rate for rate in HALF], PAIR, "acceptance below what is published", "template"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (
            ("vllm", BLOCK_TOO_LONG, "m", "acceptance low", "block"),
            ("sglang", BLOCK_TOO_LONG, "m", "acceptance low", "template"),  # it publishes no positions
            ("vllm", OTHER_LAYOUT, "m", "acceptance near zero", "layout"),
        )),
    ],
)  # fmt: skip
def test_low_acceptance_is_wrong(kind: str, rates: Sequence[float], model: str, name: str, likeliest: str) -> None:
    found = ask(kind, rates, model)
    assert names(found) == ([name], [])
    causes = [cause.name for cause in found.findings[0].causes]
    assert causes[0] == likeliest
    assert {"layout", "pairing", "block", "projections", "cache"} <= set(causes)


def test_without_a_figure_to_compare_with_nothing_is_judged() -> None:
    found = ask("vllm", HALF, "m")
    assert names(found) == ([], ["acceptance not judged"])
    assert "other targets with 15 drafts have 2.93 to 9.10" in found.unmeasured[0].figure
    assert [cause.name for cause in found.unmeasured[0].causes][:2] == ["reference", "template"]


@pytest.mark.full
def test_faults_that_only_some_prompts_show() -> None:
    collapsed = (0.05, *[0.0] * 14)
    assert names(ask("vllm", HEALTHY, long=collapsed)) == (["acceptance collapses at long contexts"], [])
    assert names(ask("vllm", HEALTHY, again=collapsed)) == (["acceptance falls on a repeated prefix"], [])


def test_published_figures_are_found_by_name_and_length() -> None:
    def found(model: str, length: float | None, target: str = "") -> float | None:
        runtime = Runtime(kind="vllm", version=None, model=model, max_model_len=None, target=target)
        published = published_tau(runtime, length)
        return None if published is None else published.lowest

    assert found("openai/gpt-oss-120b", 9) == found("x", 9.4, "/models/gpt-oss-120b") == 3.7
    assert [found("gpt-oss-120b", length) for length in (2, 3, 5, 7, 15)] == [None, 2.7, 3.3, 3.3, 3.7]
    assert found("Qwen/Qwen3-8B-FP8", 15) == 4.24
    assert found("Qwen/Qwen3-8B-Base", 15) is found("Qwen/Qwen3-80B", 15) is found("Qwen/Qwen3-8B", None) is None


RUNTIMES = {
    kind: Runtime(kind=kind, version=None, model="m", max_model_len=None, num_draft_tokens=7, target=PAIR)
    for kind in ("dflash-trt", "vllm")
}  # fmt: skip
EMPTY = ProbeGroup(name="none", is_left_out=True, why_not="left out")
RATES = [100.0, 110.0, 105.0, 100.0, 105.0]


def speeds(drafted: float, served: float | None = None) -> list[Speed]:
    """With drafts of three tokens and with the server's own length, over plain decoding."""
    measured = {None: [(served or drafted) * rate for rate in RATES], 0: RATES, 3: [drafted * rate for rate in RATES]}
    return [
        Speed(concurrency=count, draft_length=length, tokens_per_second=rates)
        for count in (1, 16)
        for length, rates in measured.items()
    ]  # fmt: skip


def probed(**changed: Any) -> Probed:
    """Probe results of a healthy server of ours."""
    groups = {
        "short": group("short prompts"), "served": group("as served", count=6),
        "long": group("long prompts", count=8, input_tokens=5000),
        "seeds": (group("seed 1", count=6, text="x"), group("seed 2", count=6, text="y")),
        "prefixes": (group("new prefixes", count=8), group("the same again", count=8)),
        "plain": group("plain decoding", count=6), "foreign": EMPTY, "thinking": (EMPTY, EMPTY),
        "speeds": speeds(1.5), "speeds_missing": "", "unreadable": "", "how": "counters",
    }  # fmt: skip
    return Probed(**(groups | changed))


def verdict(kind: str = "dflash-trt", expected_tau: float | None = None, **changed: Any) -> Verdict:
    return judged(RUNTIMES[kind], probed(**changed), {}, expected_tau, None)


IDLE = ProbeGroup(
    name="idle",
    samples=[
        ProbeAnswer(prompt=f"p{i}", text=str(i), output_tokens=48, seconds=1.0, acceptance=drafting(0, 0, 0))
        for i in range(8)
    ],
)


HALF_IDLE = ProbeGroup(name="half", samples=[*group("half", count=3, input_tokens=5000).samples, *IDLE.samples[3:6]])
FEW_TOKENS = ProbeGroup(
    name="few", samples=[msgspec.structs.replace(each, output_tokens=3) for each in group("few", count=6).samples]
)
UNPUBLISHED = ProbeGroup(
    name="short prompts",
    samples=[
        msgspec.structs.replace(each, acceptance=None, tau_of_drafting_passes=None)
        for each in group("short prompts").samples
    ],
)


@pytest.mark.parametrize(
    ("changed", "wrong", "missing"),
    [
        ({}, [], []),
        ({"served": IDLE, "speeds": speeds(0.9, served=1.0)}, [], []),  # plain decoding is faster: the policy is right
        ({"long": IDLE}, ["no drafts at long contexts"], []),
        ({"speeds": speeds(0.5)}, ["slower than plain decoding"] * 2, []),
        ({"speeds": [], "speeds_missing": OUT_OF_TIME}, [], ["acceptance not judged", "speed not measured"]),
        ({"speeds": [], "speeds_missing": NO_LOAD}, [], ["acceptance not judged"]),
        ({"long": ProbeGroup(name="long", why_not=OUT_OF_TIME)}, [], ["long contexts not measured"]),
        ({"plain": ProbeGroup(name="plain", why_not=OUT_OF_TIME)}, [], ["lossless not measured"]),
        ({"prefixes": (EMPTY, group("again", count=2))}, [], ["repeated prefixes not measured"]),
        ({"seeds": (EMPTY, EMPTY)}, [], ["temperature not measured"]),
        ({"unreadable": "no page"}, [], ["metrics cannot be read"]),
        ({"short": group("short prompts", count=2)}, [], ["too few answers"]),
        ({"served": ProbeGroup(name="served", why_not=OUT_OF_TIME)}, [], ["drafting not measured"]),
        ({"long": HALF_IDLE}, [], ["long contexts not measured"]),
        ({"long": group("long", count=8, input_tokens=100)}, [], ["long contexts not measured"]),
        ({"prefixes": (group("new", count=6), HALF_IDLE)}, [], ["repeated prefixes not measured"]),
        ({"prefixes": (group("new", count=8), IDLE)}, ["no drafts on a repeated prefix"], []),
        ({"seeds": (FEW_TOKENS, FEW_TOKENS)}, [], ["temperature not measured"]),
    ],
)
def test_each_check_is_fine_wrong_or_not_measured(
    changed: dict[str, Any], wrong: list[str], missing: list[str]
) -> None:
    """Beyond those whose texts are frozen below."""
    found = verdict(**changed)
    assert names(found) == (wrong, missing)
    by_verdict = {check.verdict for check in found.checks}
    assert ("WRONG" in by_verdict) == bool(wrong)
    assert all(check.figure for check in found.checks)
    if missing:
        assert "not measured" in by_verdict


@pytest.mark.parametrize(
    ("factor", "drawn", "wrong", "missing"),
    [
        (1.0, group("seed 1", count=6, text="x"), [], []),
        (1.0, group("seed 1", 0.1, count=6, text="x"), ["acceptance when sampling below the baseline"], []),
        (1.0, HALF_IDLE, [], ["acceptance when sampling not measured", "temperature not measured"]),
        (0.6, group("seed 1", count=6, text="x"), ["acceptance below the baseline"], []),
    ],
)
def test_against_a_baseline(factor: float, drawn: ProbeGroup, wrong: list[str], missing: list[str]) -> None:
    """Nothing more is left unmeasured, and a loss while sampling is found."""
    drawn = msgspec.structs.replace(drawn, name="seed 1")
    other = EMPTY if missing else group("seed 2", count=6, text="y")
    healthy = {each.name: each for each in probed().groups if each.samples}
    changed = probed(short=group("short prompts", factor), seeds=(drawn, other), speeds=[], speeds_missing=NO_LOAD)
    assert names(judged(RUNTIMES["dflash-trt"], changed, healthy, None, None)) == (wrong, missing)


@pytest.mark.full
@pytest.mark.parametrize(
    ("refuses", "check"),
    [
        (lambda text, _: text.startswith("Continue") and len(text) > 1000, "long contexts"),
        (lambda text, _: text.startswith("["), "repeated prefixes"),
        (lambda _, seed: seed == 2, "temperature"),
    ],
)
def test_what_a_server_refuses_is_not_measured(refuses: Callable[[str, object], bool], check: str) -> None:
    """By what is asked: the prompt, and the seed."""
    found = ask("vllm", HEALTHY, refuses=lambda body: refuses(body["messages"][0]["content"], body.get("seed")))
    assert names(found) == ([], [f"{check} not measured"])
    assert found.unmeasured[0].figure.startswith("the server refuses it: ")


def test_low_acceptance_that_scatters_is_not_fine() -> None:
    """Two of sixteen prompts accept nearly everything, and hide in the noise that the others accept little."""
    samples = [*group("s", 0.3).samples[:14], *group("s", 3.0).samples[14:]]
    found = verdict(expected_tau=2.91, short=ProbeGroup(name="short prompts", samples=samples))
    assert names(found) == ([], ["acceptance in doubt"])
    assert "16 answers scatter too much to tell" in found.checks[0].figure
    assert names(verdict(expected_tau=2.91)) == ([], [])
    fewer = ProbeGroup(name="short prompts", samples=[sample(f"p{i}", (0.7, 0.5)) for i in range(16)])
    healthy = {"short prompts": group("short prompts")}  # 7 draft tokens: only the first is compared
    assert names(judged(RUNTIMES["vllm"], probed(short=fewer, plain=EMPTY), healthy, None, None)) == ([], [])


def test_speeds_that_scatter_are_no_ground() -> None:
    noisy = [
        Speed(concurrency=s.concurrency, draft_length=s.draft_length, tokens_per_second=[20.0, 150.0, 30.0, 99.0, 25.0])
        if s.draft_length is None else s for s in speeds(1.0)
    ]  # fmt: skip
    found = verdict(speeds=noisy)
    assert names(found) == ([], [])
    speed, acceptance = found.checks[-1], found.checks[0]
    assert (speed.verdict, "too noisy" in speed.figure) == ("not measured", True)
    assert "against the lowest published, 1.90" in acceptance.figure


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_twenty_servers_of_each_runtime(kind: str, seed: int) -> None:
    """Neither a false alarm, nor an all-clear for one of what threads report."""
    assert names(ask(kind, HEALTHY, seed=seed)) == ([], [])
    rates, model = ((BLOCK_TOO_LONG, "m"), (HALF, PAIR), (OTHER_LAYOUT, "m"))[seed % 3]
    wrong, missing = names(ask(kind, rates, model, seed=seed))
    assert [name.partition(" ")[0] for name in wrong + missing] == ["acceptance"]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 20))])
def test_twenty_healthy_runs_of_each_runtime(seed: int) -> None:
    """Requests as `SHARES` make them, scattered: no finding, no note of a fault, whatever reference there is."""
    generator = random.Random(seed)

    def drawn(name: str, count: int, **fields: int) -> ProbeGroup:
        drawn = [group(name, generator.gauss(1, 0.15), count=1, text=str(i), **fields) for i in range(count)]
        return ProbeGroup(name=name, samples=[
            msgspec.structs.replace(each.samples[0], prompt=str(i)) for i, each in enumerate(drawn)
        ])  # fmt: skip

    for kind, more in (("dflash-trt", {}), ("vllm", {"speeds": [], "speeds_missing": NO_PLAIN, "plain": EMPTY})):
        groups = {
            "short": drawn("short prompts", 16),
            "served": drawn("as served", 6),
            "long": drawn("long", 8, input_tokens=5000),
        }
        pairs = {"prefixes": (drawn("first", 8), drawn("again", 8))}
        found = verdict(kind, 2.5 if kind == "vllm" else None, **groups, **pairs, **more)
        assert names(found) == ([], [])


def test_every_cause_is_named_by_some_fault() -> None:
    """Figures as each fault brings them; a cause that nothing names would be dead text."""
    short, kind = group("short"), "dflash-trt"
    low = group("short", 0.3)
    found = [
        *low_acceptance(kind, group("short", 0.02), None, None), *low_acceptance(kind, IDLE, None, None),
        *low_acceptance(kind, low, None, None), *low_acceptance(kind, low, None, 2.9),
        *not_judged(kind, short, 7), *not_seen(kind, short, "no page", ""),
        *not_seen(kind, ProbeGroup(name="s"), "", ""), *not_seen(kind, ProbeGroup(name="s", samples=[
            msgspec.structs.replace(s, acceptance=None, tau_of_drafting_passes=None) for s in short.samples]), "", "h"),
        *no_drafts(kind, IDLE, "drafting stopped", "stopped"),
        *long_contexts(kind, short, group("long", 0.02, count=8), None),
        *repeated_prefixes(kind, short, group("again", 0.3)),
        *temperature(kind, short, short), *lossless(kind, short, group("plain", text="other")),
        *rejected_requests(kind, ProbeGroup(name="s", samples=[sample("p", (0.0,)), *short.samples])),
        *slow_drafts(kind, speeds(0.5)), *prefix_hits(kind, short, 0),
        *drafting_notes(kind, short, group("one", 0.05), group("two", 0.2), (short, group("off", 0.1))),
    ]  # fmt: skip
    for engine in (Engine(preemptions=3), Engine(passes=0)):
        verdict = judge("vllm", traffic("vllm", engine), None, None)
        found += [*verdict.notes, *verdict.unmeasured]
    assert {cause.name for finding in found for cause in finding.causes} == cause_entries().keys()


GOLDEN = REPOSITORY / "tests" / "golden" / "doctor"
TEXTS: dict[str, dict[str, Any]] = {
    "healthy": {}, "stopped": {"served": IDLE}, "low": {"short": group("short prompts", 0.4)},
    "not-judged": {"kind": "vllm", "speeds": [], "speeds_missing": NO_PLAIN, "plain": EMPTY, "served": EMPTY},
    "not-measured": {"kind": "vllm", "unreadable": "its metrics cannot be read: expected a page, found <html>",
                     "speeds": [], "speeds_missing": NO_LOAD},
    "near-zero": {"short": group("short prompts", 0.02)}, "no-drafts": {"short": IDLE, "served": IDLE},
    "collapsed": {"long": group("long prompts", 0.04, count=8, input_tokens=5000)},
    "prefix": {"prefixes": (group("new prefixes", count=8), group("the same again", 0.3, count=8))},
    "temperature": {"seeds": (group("seed 1", count=6), group("seed 2", count=6))},
    "lossless": {"plain": group("plain decoding", count=6, text="other")}, "slower": {"speeds": speeds(0.5)},
    "unpublished": {"short": UNPUBLISHED, "served": EMPTY},
    "refused": {"long": ProbeGroup(name="long prompts", why_not="the server refuses it: 400")},
    "worth-knowing": {"foreign": group("other languages", 0.2, count=6)},
}  # fmt: skip


def printed(name: str) -> str:
    """Output of `doctor URL` for a made-up diagnosis, on a screen of 200 columns."""
    kind, found = TEXTS[name].get("kind", "dflash-trt"), verdict(**TEXTS[name])
    groups = probed(**{key: value for key, value in TEXTS[name].items() if key != "kind"})
    diagnosis = Diagnosis(
        url="http://h", runtime=kind, version="1", model="m", is_chat=True, acceptance="counters", seconds=9.0,
        groups=groups.groups, speeds=groups.speeds, **msgspec.structs.asdict(found),
    )  # fmt: skip
    output = io.StringIO()
    with redirect_stdout(output):
        import_module("dflash_trt.cli.doctor").print_diagnosis(diagnosis)
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_frozen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wanted change: COLUMNS=200 python -m tests.observe.diagnosis.test_verdict"""
    monkeypatch.setenv("COLUMNS", "200")
    assert printed(name) == (GOLDEN / f"{name}.txt").read_text()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in TEXTS:
        (GOLDEN / f"{each}.txt").write_text(printed(each))
