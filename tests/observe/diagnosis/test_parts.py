# SPDX-License-Identifier: Apache-2.0
"""A part that accepts nothing is found, whatever the rest does: an engine, a request, a position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dflash_trt.observe.diagnosis.diagnosis import Diagnosis, diagnose
from dflash_trt.observe.diagnosis.judge_acceptance import in_doubt, low_acceptance
from dflash_trt.observe.diagnosis.judge_parts import cliff, dead_engines, rejected_requests
from dflash_trt.observe.diagnosis.probe_answers import ProbeAnswer, ProbeGroup
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.counter_growth import EngineAcceptance
from dflash_trt.observe.endpoints.observed_acceptance import drafting
from tests.observe.diagnosis.look_alikes import HEALTHY, LookAlike, running


def ask(kind: str, **more: Any) -> Diagnosis:
    server = LookAlike(kind, HEALTHY, model="Qwen/Qwen3-8B", **more)
    with running(server) as url, Client(url) as client:
        return diagnose(client, has_load=False)


def requests(counts: Sequence[tuple[int, Sequence[int]]]) -> ProbeGroup:
    """A request for each pair of passes and drafts accepted at position 1, 2, ..."""
    samples = [
        ProbeAnswer(
            prompt=f"p{index}", text="", output_tokens=64, seconds=1.0,
            acceptance=drafting(passes, sum(accepted), passes * len(accepted), accepted),
            tau_of_drafting_passes=1 + sum(accepted) / passes,
        )
        for index, (passes, accepted) in enumerate(counts)
    ]  # fmt: skip
    return ProbeGroup(name="short prompts", samples=samples)


@pytest.mark.parametrize(
    ("count", "dead"),
    [(4, [2]), *(pytest.param(count, [1], marks=pytest.mark.full) for count in (2, 8))],
)
def test_one_dead_engine(count: int, dead: list[int]) -> None:
    found = ask("vllm", engines=count, dead=dead)
    assert "an engine accepts no drafts" in [finding.name for finding in found.findings]
    (acceptance,) = (check for check in found.checks if check.name == "acceptance")
    assert acceptance.verdict == "WRONG"
    assert [each.engine for each in found.engines if each.tau == 1] == [str(number) for number in dead]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sglang", "tensorrt-llm"])
def test_a_dead_engine_of_a_runtime_without_labels(kind: str) -> None:
    assert "requests without an accepted draft" in [finding.name for finding in ask(kind, engines=4, dead=[2]).findings]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_twenty_healthy_servers_of_several_engines(seed: int) -> None:
    found = ask("vllm", engines=(2, 4, 8)[seed % 3], seed=seed)
    assert (found.findings, found.unmeasured) == ([], [])
    assert "in engine 1" in next(check.figure for check in found.checks if check.name == "engines")


def engine(name: str, passes: int, accepted: int, tokens: int = 1000) -> EngineAcceptance:
    return EngineAcceptance(engine=name, drafting_passes=passes, accepted=accepted, output_tokens=tokens)


def test_engines_are_judged_by_passes_and_tokens() -> None:
    healthy = engine("0", 200, 400)
    (finding,) = dead_engines("vllm", [healthy, engine("1", 64, 2)])
    assert finding.figure == "acceptance length 1.03 in engine 1, against 3.00 in engine 0"
    (finding,) = dead_engines("vllm", [healthy, engine("1", 0, 0)])
    assert finding.figure == "engine 1 verified no draft; acceptance length 3.00 in engine 0"
    assert dead_engines("vllm", [healthy, engine("1", 5, 0, 6)]) == []
    assert dead_engines("vllm", [healthy, engine("1", 0, 0, 0)]) == []
    assert dead_engines("vllm", [engine("0", 64, 0), engine("1", 64, 0)]) == []  # acceptance near zero says it


def test_requests_that_accept_nothing() -> None:
    (finding,) = rejected_requests("vllm", requests([(64, (0, 0)), *[(20, (15, 10))] * 7]))
    assert "1 of 8 requests accepted no draft in 64 or more passes each" in finding.figure
    assert rejected_requests("vllm", requests([(8, (0, 0)), *[(20, (15, 10))] * 7])) == []


def test_the_figure_that_is_printed_is_judged() -> None:
    """Half of the requests accept all and need few passes: the mean over requests is twice the pooled figure."""
    short = requests([(64, (1, 0, 0, 0)), (16, (14, 12, 12, 10))] * 8)
    assert short.tau_of_drafting_passes == pytest.approx(1.6125)
    assert sum(short.pooled_values) / 16 == pytest.approx(0.6125)
    (finding,) = low_acceptance("vllm", short, None, 3.0) or in_doubt("vllm", short, None, 3.0, None)
    assert finding.figure.startswith("tau of drafting passes 1.61")


def test_a_cliff_between_positions() -> None:
    rates = (0.9, 0.75, 0.6, 0.5, 0.0, 0.0, 0.0)
    short = requests([(20, [round(20 * rate) for rate in rates])] * 16)
    (finding,) = cliff("vllm", short.acceptance)
    assert finding.figure == "position 4 accepts 160 drafts in 320 passes, the next 0"
    assert cliff("vllm", requests([(20, (18, 15, 12, 10, 8, 6, 5))] * 16).acceptance) == []
    assert cliff("vllm", requests([(20, (18, 3, 1, 0, 0, 0, 0))] * 16).acceptance) == []  # steep, and no cliff
    shorter = requests([(20, (18, 15, 12, 10))] * 16)
    assert cliff("vllm", shorter.acceptance) == []
