# SPDX-License-Identifier: Apache-2.0
"""A server's own traffic is judged without prompts: each fault is found, and healthy traffic raises nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt.errors import EndpointError
from dflash_trt.observe.diagnosis.checks import Verdict
from dflash_trt.observe.endpoints.counter_growth import grown
from dflash_trt.observe.endpoints.counter_names import COUNTER_NAMES
from dflash_trt.observe.endpoints.identify import ServerKind
from dflash_trt.observe.endpoints.metrics_page import MetricsPage
from dflash_trt.observe.traffic.judge_traffic import judge
from dflash_trt.observe.traffic.traffic import Traffic, traffic_of
from dflash_trt.observe.traffic.window import Window
from tests.cli.commands import run
from tests.observe.endpoints.canned import canned, models
from tests.observe.traffic.pages import HEALTHY, NAMES, Engine, page

KINDS = tuple(NAMES)
STOPS = (0.85, 0.7, 0.58, 0.47, 0, 0, 0)
PATHS = {"vllm": "/metrics", "sglang": "/metrics", "tensorrt-llm": "/prometheus/metrics"}


def traffic(kind: ServerKind, *engines: Engine, model: str | None = None) -> Traffic:
    """The growth from one reading to one with twice the counts."""
    before, after = (MetricsPage.parse(page(kind, *each).encode(), "page") for each in (engines, _twice(engines)))
    return traffic_of(Window(grown(before, after, COUNTER_NAMES[kind].counters), after, 60.0), kind, model)


def _twice(engines: tuple[Engine, ...]) -> tuple[Engine, ...]:
    return tuple(engine.times(2) for engine in engines)


def names(verdict: Verdict) -> list[str]:
    return [finding.name for finding in verdict.findings]


@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_each_runtime(kind: ServerKind) -> None:
    now = traffic(kind, Engine())
    assert now.acceptance.drafting_passes == 4000
    assert now.acceptance.tau_of_drafting_passes == pytest.approx(1 + sum(HEALTHY), abs=0.01)
    assert now.acceptance.shares_by_position == ([] if kind == "sglang" else pytest.approx(HEALTHY))
    assert now.acceptance.draft_length == (None if kind == "sglang" else 7)
    assert (now.hit_rate, now.cache_use, now.waiting) == (pytest.approx(0.4), 0.4, 0)
    assert now.tpot_seconds == pytest.approx(0.008)
    assert now.tpot_p95_seconds == pytest.approx(0.0124)  # half of the bucket from 8.8 to 16 ms


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_traffic_raises_nothing(kind: ServerKind) -> None:
    verdict = judge(kind, traffic(kind, Engine()), traffic(kind, Engine(passes=3000)), None)
    assert (names(verdict), verdict.unmeasured, verdict.notes) == ([], [], [])
    assert names(judge(kind, traffic(kind, Engine()), None, 4.4)) == []


FAULTS: dict[str, tuple[Engine, ...]] = {
    "no drafts": (Engine(rates=()),),
    "acceptance near zero": (Engine(rates=(0.05, 0.01)),),
    "acceptance has fallen": (Engine(rates=[0.8 * rate for rate in HEALTHY]),),
    "an engine accepts no drafts": (Engine(), Engine(rates=[0] * 7)),
    "an engine decodes without drafts": (Engine(), Engine(rates=())),
    "acceptance stops at a position": (Engine(rates=STOPS),),
    "fewer drafts a step": (Engine(rates=HEALTHY[:4]),),
    "prefix hits fell to zero": (Engine(prefix_hits=0),),
    "slower per user": (Engine(milliseconds=11),),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str) -> None:
    assert fault in names(judge("vllm", traffic("vllm", *FAULTS[fault]), traffic("vllm", Engine()), None))


def test_notes_on_caches_and_queue() -> None:
    busy = Engine(preemptions=3, waiting=2, prefix_hits=0)
    verdict = judge("vllm", traffic("vllm", busy), None, 4.5)
    assert [note.name for note in verdict.notes] == ["no prefix hits", "preemptions", "requests wait"]
    assert names(verdict) == []


def test_little_traffic_is_not_judged() -> None:
    little = Engine(passes=300)
    verdict = judge("vllm", traffic("vllm", little), None, 9.0)
    assert names(verdict) == []
    assert "300 verify passes with drafts, fewer than 1000" in verdict.unmeasured[0].figure
    idle = judge("vllm", traffic("vllm", Engine(passes=0)), None, None)
    assert [check.verdict for check in idle.checks] == ["not measured"] * 3


def test_acceptance_without_a_reference_is_not_judged() -> None:
    (found,) = judge("vllm", traffic("vllm", Engine()), None, None).unmeasured
    assert "nothing to compare it with" in found.figure


def test_a_restart_and_several_models() -> None:
    first, second = (MetricsPage.parse(page("vllm", each).encode(), "page") for each in (Engine(), Engine(passes=10)))
    with pytest.raises(EndpointError, match="fell between the two readings"):
        grown(first, second, COUNTER_NAMES["vllm"].counters)
    shorter = MetricsPage.parse(page("vllm", Engine(rates=HEALTHY[:3])).encode(), "page")
    with pytest.raises(EndpointError, match="fell between"):
        grown(first, shorter, COUNTER_NAMES["vllm"].counters)
    with pytest.raises(EndpointError, match="several models"):
        traffic("vllm", Engine(), Engine(model="n"))
    assert traffic("vllm", Engine(), Engine(passes=7000, model="n"), model="n").acceptance.drafting_passes == 7000


def counting(kind: str, engine: Engine) -> Callable[[], str]:
    """A page whose counts grow by `engine`'s at each reading."""
    readings: Iterator[int] = iter(range(1, 100))
    return lambda: page(kind, engine.times(next(readings)))


@pytest.mark.parametrize("kind", ["tensorrt-llm", *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[:2])])
def test_the_command_and_its_baseline(kind: str, tmp_path: Path) -> None:
    def passive(engine: Engine, *more: object) -> tuple[int, dict[str, list[dict[str, object]]], str]:
        pages = {"/v1/models": models(NAMES[kind]), PATHS[kind]: counting(kind, engine)}
        with canned(pages) as url:
            done = run("doctor", url, "--passive", "--seconds", 1, "--json", *more)
        return done.returncode, json.loads(done.stdout), done.stderr

    code, document, _ = passive(Engine(), "--expect-tau", 4.5)
    assert (code, document["schema"]) == (0, "dflash-trt/doctor-passive/1")
    (tmp_path / "before.json").write_text(json.dumps(document))
    worse = Engine(rates=[0.7 * rate for rate in HEALTHY])
    code, document, error = passive(worse, "--baseline", tmp_path / "before.json")
    assert code == 1
    assert [finding["name"] for finding in document["findings"]] == ["acceptance has fallen"]
    assert "acceptance has fallen" in error


def test_the_tables(tmp_path: Path) -> None:
    pages = {"/v1/models": models("vllm"), "/metrics": counting("vllm", replace(Engine(), preemptions=2))}
    with canned(pages) as url:
        done = run("doctor", url, "--passive", "--seconds", 1, "--expect-tau", 4.5)
    assert done.returncode == 0, done.stderr
    for text in ("acceptance length 4.52, expected 4.50", "8.0 ms", "worth knowing: preemptions", "nothing wrong in"):
        assert text in done.stdout, done.stdout
    refused = run("doctor", url, "--passive", "--no-load")
    assert refused.returncode == 2
    assert "--no-load is for the prompts that --passive does not send" in refused.stderr
