# SPDX-License-Identifier: Apache-2.0
"""What `tune` writes keeps its word: the speed at every batch, and nothing to tune a second time."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.deploy.deployment_file import shipped_deployments
from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.acceptance_profile import from_tau
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.curve import Traffic, point
from dflash_trt.observe.estimate.inputs import open_system
from dflash_trt.observe.estimate.shapes import System
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.observe.estimate.tuned_deployment import TunedDeployment, tune_deployment
from dflash_trt.observe.estimate.tuning import Price, _schedule

REFUSED = "gpt-oss-120b.b200x2.throughput"  # attention data parallelism
QUICK = ("gpt-oss-120b.h200x8.latency", "qwen3-4b.h200x1.latency", "gpt-oss-20b.b200x1.nvfp4")
SLO = 50.0
TRAFFIC = Traffic()


def tuned(config: str, slo: float = SLO) -> TunedDeployment:
    return tune_deployment(
        config, TRAFFIC, slo=slo, acceptance=None, tau=4.0, runtime="trtllm", measured=None, target=None, draft=None
    )


def price_of(system: System) -> Price:
    assert system.draft is not None
    model, profile = StepModel(system, rates(system.gpu, "trtllm")), from_tau(4.0, system.draft.max_draft_tokens)
    return lambda batch, length: point(model, "dflash", profile, TRAFFIC, batch, length).user_rate


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in shipped_deployments() if n != REFUSED],
)
def test_a_tuned_file_keeps_the_speed_and_is_not_tuned_again(name: str, tmp_path: Path) -> None:
    first = tuned(name)
    file = tmp_path / "tuned.yaml"
    file.write_text(first.text)
    assert tuned(str(file)).text == first.text
    deployment, system = open_system(str(file), "trtllm", None, None)
    price = price_of(system)
    schedule = deployment.draft_schedule or ((1, deployment.num_draft_tokens),)
    ends = [begin - 1 for begin, _ in schedule[1:]] + [deployment.max_batch_size]
    for (begin, length), end in zip(schedule, ends, strict=True):
        for batch in {begin, (begin + end) // 2, end}:
            assert price(batch, length) >= SLO * (1 - 1e-9), (batch, length)
    promised = first.tuning
    assert promised.user_rate.value == pytest.approx(price(ends[-1], schedule[-1][1]))
    assert promised.gpu_rate.value == pytest.approx(ends[-1] * promised.user_rate.value / system.num_gpus)


def test_a_shorter_schedule_does_not_cost_the_speed() -> None:
    """Nine drafts are within 2 % of eight at batch 16, but only eight keep 100 tokens/s."""
    speeds = {1: {8: 290, 9: 300}, 16: {8: 100.2, 9: 98.6}}
    at = lambda batch, length: speeds[1 if batch < 16 else 16][length] - batch * 1e-6  # noqa: E731
    assert _schedule(at, 16, [8, 9], 100) == ((1, 9), (16, 8))
    assert _schedule(at, 16, [8, 9], 90) == ((1, 9),)


def test_a_length_that_only_a_large_batch_needs_is_there_from_the_start() -> None:
    """Runtimes draft at most what they begin with."""
    speeds = {1: {4: 300, 9: 297}, 16: {4: 90, 9: 110}}
    at = lambda batch, length: speeds[1 if batch < 16 else 16][length]  # noqa: E731
    assert _schedule(at, 16, [4, 9], 100) == ((1, 9),)
    assert _schedule(at, 16, [4, 9], 310) == ((1, 4),), "where nothing keeps the speed, the best for one user"


def test_the_longest_context_stays_what_the_file_says(tmp_path: Path) -> None:
    """But requests that were asked about fit."""
    assert "max_seq_len" not in tuned(QUICK[0]).text
    file = tmp_path / "long.yaml"
    source = shipped_deployments()[QUICK[0]].read_text()
    file.write_text(source + "max_seq_len: 65536\n")
    long = tuned(str(file))
    assert "max_seq_len: 65536" in long.text
    file.write_text(source + "max_seq_len: 1024\n")
    assert f"max_seq_len: {TRAFFIC.max_tokens}" in tuned(str(file)).text
    assert long.tuning.best.gpu_rate <= tuned(QUICK[0]).tuning.best.gpu_rate


def test_a_speed_that_nothing_reaches_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a setting with 1e\\+09 tokens/s"):
        tuned(QUICK[1], slo=1e9)
