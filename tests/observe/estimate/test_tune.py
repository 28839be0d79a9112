# SPDX-License-Identifier: Apache-2.0
"""Settings for a speed: the best there is, measured points before the model, and a file that serve-config takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dflash_trt.deploy.deployment_file import load_deployment
from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.acceptance_profile import from_tau
from dflash_trt.observe.estimate.curve import Traffic, point
from dflash_trt.observe.estimate.measured_points import MeasuredPoint, MeasuredPoints
from dflash_trt.observe.estimate.tuning import TIE, tune
from tests.cli.commands import run
from tests.observe.estimate.systems import DENSE, MOE, model_of, system_of

TAU = from_tau(4.7, 9)


def points(*rows: tuple[int, int, float]) -> MeasuredPoints:
    return MeasuredPoints(tuple(MeasuredPoint(*row) for row in rows))


def test_the_best_batch_keeps_the_speed_and_the_next_does_not() -> None:
    tuning = tune({"bf16": system_of(DENSE)}, Traffic(), from_tau(6.5, 15), 300)
    best, model = tuning.best, model_of(DENSE)

    def fastest(batch: int) -> float:
        return max(point(model, "dflash", from_tau(6.5, 15), Traffic(), batch, k).user_rate for k in range(16))

    assert fastest(best.batch) == pytest.approx(best.user_rate, rel=TIE), "a shorter schedule may cost that much"
    assert best.user_rate >= 300
    assert fastest(best.batch) >= 300 > fastest(best.batch + 1)
    assert best.limit == "speed"


def test_memory_limits_a_low_speed() -> None:
    tuning = tune({"bf16": system_of(DENSE, gpu_memory_bytes=60 * 10**9)}, Traffic(), from_tau(6.5, 15), 20)
    assert tuning.best.limit.startswith("memory: caches of requests")


def test_no_other_candidate_is_better_by_more_than_the_price_of_quantisation() -> None:
    tuning = tune({"bf16": system_of(MOE)}, Traffic(), TAU, 400)
    assert all(other.gpu_rate <= tuning.best.gpu_rate for other in tuning.others)
    assert all(other.user_rate >= 400 for other in tuning.others)
    assert {(other.tensor_parallel, other.expert_parallel) for other in tuning.others} > {(8, 1), (4, 1)}


def test_schedules_begin_with_the_longest_and_end_with_the_batch() -> None:
    tuning = tune({"bf16": system_of(MOE)}, Traffic(), TAU, 100)
    batches = [batch for batch, _ in tuning.schedule]
    assert batches[0] == 1
    assert batches == sorted(batches)
    assert tuning.schedule[0][1] == max(length for _, length in tuning.schedule) == 9
    assert tuning.schedule[-1][1] < 9  # long blocks do not pay at large batches


def test_more_speed_never_gives_more_throughput() -> None:
    rates = [tune({"bf16": system_of(MOE)}, Traffic(), TAU, slo).best.gpu_rate for slo in (100, 300, 500, 900)]
    assert rates == sorted(rates, reverse=True)


def test_a_speed_that_nothing_reaches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a setting with 5000 tokens/s for each user, found at most \d+"):
        tune({"bf16": system_of(MOE)}, Traffic(), TAU, 5000)


def test_measured_points_come_before_the_model() -> None:
    """Drafts of 9 are measured to be useless beyond one user; the model's error is said."""
    measured = points((1, 9, 1000.0), (64, 9, 100.0))
    tuning = tune({"bf16": system_of(MOE)}, Traffic(), TAU, 500, lengths=[9], measured=measured)
    assert tuning.best.tensor_parallel == 8
    # 1 / ((1 - s) / 1000 + s / 100) >= 500 up to s = 1/9 of the way from 1 to 64
    assert tuning.best.batch == 8
    model = model_of(MOE)
    errors = [
        abs(point(model, "dflash", TAU, Traffic(), batch, 9).user_rate / rate - 1)
        for batch, rate in ((1, 1e3), (64, 100))
    ]
    assert tuning.model_error == pytest.approx(sum(errors) / 2)
    assert [one.measured.batch for one in tuning.measured] == [1, 64]
    assert [abs(one.error) for one in tuning.measured] == pytest.approx(errors)


def test_what_was_not_measured_is_the_model_as_far_as_it_was_off() -> None:
    """Everything is half as fast as the model says: 9 drafts, measured, must not lose against 8, predicted."""
    model = model_of(MOE)
    halves = [(b, 9, point(model, "dflash", TAU, Traffic(), b, 9).user_rate / 2) for b in (1, 8, 64)]
    plain = tune({"bf16": system_of(MOE)}, Traffic(), TAU, 300, lengths=[8, 9], is_scheduled=False, measured=None)
    tuning = tune({"bf16": system_of(MOE)}, Traffic(), TAU, 150, lengths=[8, 9], measured=points(*halves))
    assert tuning.model_factor == pytest.approx(0.5)
    assert tuning.best.draft_tokens == plain.best.draft_tokens
    assert tuning.best.user_rate == pytest.approx(150, rel=0.02)


def test_the_file_it_writes_is_served(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    result = run("tune", MOE, "--slo", "300", "--tau", "4.7", "-o", str(file))
    assert result.returncode == 0, result.stderr
    tuned = load_deployment(file)
    assert tuned.draft_schedule is not None
    assert tuned.num_draft_tokens == tuned.draft_schedule[1] == 9
    assert re.search(rf"│\s*{tuned.max_batch_size} │", result.stdout)
    served = run("serve-config", str(file), "--runtime", "trtllm")
    assert served.returncode == 0, served.stderr
    assert "draft_len_schedule" in served.stdout
    assert run("tune", MOE, "--slo", "300", "--tau", "4.7", "-o", str(file)).returncode == 1  # nothing is overwritten


def test_sglang_gets_one_block(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    result = run("tune", MOE, "--slo", "300", "--tau", "4.7", "--runtime", "sglang", "-o", str(file), "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "dflash-trt/tune/1"
    assert len(document["schedule"]) == 1
    served = run("serve-config", str(file), "--runtime", "sglang")
    assert f"--speculative-num-draft-tokens {document['schedule'][0][1] + 1}" in served.stdout


@pytest.mark.parametrize(("config", "recipes"), [(MOE, {"bf16", "nvfp4-native"}), (DENSE, {"bf16"})])
def test_recipes_that_the_gpu_has_tensor_cores_for(config: str, recipes: set[str]) -> None:
    result = run("tune", config, "--slo", "100", "--tau", "4", "--json")
    document = json.loads(result.stdout)
    assert {one["recipe"] for one in [document["best"], *document["others"]]} == recipes
