# SPDX-License-Identifier: Apache-2.0
"""Settings for a speed: the best there is, a bench run before the model, fleets, and files that keep their word."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path

import msgspec
import pytest
import yaml

from dflash_trt.deploy.deployment_file import load_deployment, shipped_deployments
from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.point_record import BenchPoint
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance
from dflash_trt.observe.estimate.acceptance_profile import from_tau
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.curve import BATCHES, Traffic, point
from dflash_trt.observe.estimate.inputs import open_system
from dflash_trt.observe.estimate.measured_points import MeasuredPoint, MeasuredPoints, measured_points
from dflash_trt.observe.estimate.shapes import System
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.observe.estimate.tuned_deployment import TunedDeployment, tune_deployment
from dflash_trt.observe.estimate.tuning import TIE, Fleet, Price, Tuning, schedule_for, tune
from tests.cli.commands import run
from tests.deploy.deployments import SERVED
from tests.observe.bench import samples
from tests.observe.estimate.systems import DENSE, MOE, model_of, system_of

HELD = samples.counters(10, (8, 5, 5))


def held(proposed: int) -> ObservedAcceptance:
    return msgspec.structs.replace(HELD, counts=msgspec.structs.replace(HELD.counts, proposed=proposed))


def written(directory: Path, *points: BenchPoint, runtime: str = "tensorrt-llm", num_gpus: int = 8) -> Path:
    methods = tuple(samples.method(name, runtime=runtime) for name in dict.fromkeys(each.method for each in points))
    return samples.run_of(directory, *points, methods=methods, num_gpus=num_gpus)


def test_plain_and_dflash_are_taken_with_their_draft_lengths(tmp_path: Path) -> None:
    whole = written(
        tmp_path, samples.point("none", 4, 60, 200), samples.point("eagle3", 4, 90, 300, acceptance=HELD),
        samples.point("dflash", 4, 120, 400, acceptance=HELD), samples.point("dflash", 8, 1, 1, rows=(), failed=1),
    )  # fmt: skip
    assert measured_points(whole, system_of(MOE)).points == (MeasuredPoint(4, 0, 60.0), MeasuredPoint(4, 3, 120.0))


def test_passes_of_several_lengths_are_refused(tmp_path: Path) -> None:
    """25 drafts in 10 passes of up to 3; the last pass of an answer may be shorter."""
    varied = held(25)
    whole = written(tmp_path / "varied", samples.point("dflash", 4, 120, 400, acceptance=varied))
    with pytest.raises(ConfigError, match=r"expected passes of one draft length, found 2\.50 drafts a pass"):
        measured_points(whole, system_of(MOE))
    nearly = held(29)
    whole = written(tmp_path / "nearly", samples.point("dflash", 4, 120, 400, acceptance=nearly))
    assert measured_points(whole, system_of(MOE)).points[0].num_draft_tokens == 3


@pytest.mark.parametrize(
    "acceptance", [ObservedAcceptance(source="gauges", how="a test", sampled_tau=3.0), samples.UNPUBLISHED]
)
def test_drafts_that_nobody_counts_are_refused(tmp_path: Path, acceptance: ObservedAcceptance) -> None:
    whole = written(tmp_path, samples.point("dflash", 4, 120, 400, acceptance=acceptance))
    with pytest.raises(ConfigError, match="expected the server's counts of passes and drafts, found"):
        measured_points(whole, system_of(MOE))


def test_a_run_of_something_else_is_refused(tmp_path: Path) -> None:
    system = system_of(MOE)
    plain = samples.point("none", 4, 60, 200)
    for changes, words in (
        ({"num_gpus": 4}, "expected a run on the deployment's 8 GPUs, found 4"),
        ({"runtime": "vllm"}, "none: expected a run of trtllm, found vllm"),
    ):
        with pytest.raises(ConfigError, match=words):
            measured_points(written(tmp_path, plain, **changes), system)
    with pytest.raises(ConfigError, match="has no point of the methods none or dflash on all prompts"):
        measured_points(written(tmp_path / "eagle", samples.point("eagle3", 4, 90, 300)), system)


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


def test_speeds_too_low_and_too_high() -> None:
    tuning = tune({"bf16": system_of(DENSE, gpu_memory_bytes=60 * 10**9)}, Traffic(), from_tau(6.5, 15), 20)
    assert tuning.best.limit.startswith("memory: caches of requests")
    with pytest.raises(ConfigError, match=r"no setting reaches 5000 tokens/s per user; a single user gets at most \d+"):
        tune({"bf16": system_of(MOE)}, Traffic(), TAU, 5000)


def test_candidates_speeds_and_schedules() -> None:
    slow, tuning, fast = (tune({"bf16": system_of(MOE)}, Traffic(), TAU, slo) for slo in (100, 400, 900))
    assert all(other.gpu_rate <= tuning.best.gpu_rate for other in tuning.others)
    assert all(other.user_rate >= 400 for other in tuning.others)
    assert {(other.tensor_parallel, other.expert_parallel) for other in tuning.others} > {(8, 1), (4, 1)}
    assert slow.best.gpu_rate > tuning.best.gpu_rate > fast.best.gpu_rate
    batches = [batch for batch, _ in slow.schedule]
    assert batches[0] == 1
    assert batches == sorted(batches)
    assert slow.schedule[0][1] == max(length for _, length in slow.schedule) == 9
    assert slow.schedule[-1][1] < 9  # long blocks do not pay at large batches


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
    assert tuning.best.num_draft_tokens == plain.best.num_draft_tokens
    assert tuning.best.user_rate == pytest.approx(150, rel=0.02)


def test_the_file_it_writes_is_served(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    result = run("tune", MOE, "--slo", "300", "--tau", "4.7", "-o", str(file))
    assert result.returncode == 0, result.stderr
    tuned = load_deployment(file)
    assert tuned.num_draft_tokens == tuned.draft_schedule[1] == 9
    assert re.search(rf"│\s*{tuned.max_batch_size} │", result.stdout)
    served = run("serve-config", str(file), "--runtime", "trtllm")
    assert served.returncode == 0, served.stderr
    spec = yaml.safe_load(served.stdout)["speculative_config"]
    assert spec.keys() >= {"draft_len_schedule", "acceptance_rate_window_size"}
    # Below this share a step with drafts brings one user less than a plain one: 4.7 tokens are far more.
    assert 0 < spec["acceptance_rate_threshold"] < 3.7 / 9
    assert "acceptance_rate" not in run("serve-config", str(file), "--runtime", "vllm").stdout
    assert run("tune", MOE, "--slo", "300", "--tau", "4.7", "-o", str(file)).returncode == 1  # nothing is overwritten


def test_sglang_gets_one_block(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    result = run("tune", MOE, "--slo", "300", "--tau", "4.7", "--runtime", "sglang", "-o", str(file), "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "dflash-trt/tune/1"
    assert len(document["schedule"]) == 1
    recipes = {one["recipe"] for one in [document["best"], *document["others"]]}
    assert recipes == {"bf16", "nvfp4-native"}, "for which the GPU has tensor cores"
    served = run("serve-config", str(file), "--runtime", "sglang")
    assert f"--speculative-num-draft-tokens {document['schedule'][0][1] + 1}" in served.stdout


FLEET_TRAFFIC = Traffic(prompt_tokens=1024, output_tokens=512)


@cache
def tuned_fleet(fleet: Fleet, slo: float = 300) -> Tuning:
    return tune({"bf16": system_of(MOE)}, FLEET_TRAFFIC, TAU, slo, fleet=fleet)


@pytest.mark.parametrize("request_rate", [1.0, 500.0])
def test_no_other_candidate_takes_the_rate_on_fewer_gpus(request_rate: float) -> None:
    fleet = Fleet(request_rate=request_rate, output_tokens=512)
    tuning = tuned_fleet(fleet)
    best = tuning.best
    assert tuning.replicas * best.batch * best.user_rate >= request_rate * 512
    assert (tuning.replicas - 1) * best.batch * best.user_rate < request_rate * 512  # one server less does not
    fewest = tuning.replicas * best.tensor_parallel
    assert all(fleet.replicas(other) * other.tensor_parallel >= fewest for other in tuning.others)


def test_gpus_without_a_rate_and_too_few_gpus() -> None:
    """Twelve GPUs: three servers of 4 or twelve of 1, whichever is more; of 8 only one, and four idle."""
    fleet = Fleet(num_gpus=12, output_tokens=512)
    tuning = tuned_fleet(fleet)
    best = tuning.best
    assert tuning.replicas == 12 // best.tensor_parallel
    total = tuning.replicas * best.batch * best.user_rate
    assert all(12 // o.tensor_parallel * o.batch * o.user_rate <= total for o in tuning.others if fleet.replicas(o))
    tuning = tuned_fleet(Fleet(request_rate=0.1, output_tokens=512), slo=100)
    assert tuning.replicas * tuning.best.tensor_parallel == 1
    needed = tuned_fleet(Fleet(request_rate=500, output_tokens=512))
    num_gpus = needed.replicas * needed.best.tensor_parallel
    with pytest.raises(ConfigError, match=f"500 requests/s needs at least {num_gpus} GPUs; --gpus is 8"):
        tuned_fleet(Fleet(num_gpus=8, request_rate=500, output_tokens=512))


def test_what_tune_proposes_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    result = run("tune", MOE, "--slo", 300, "--tau", 4.7, "--request-rate", 40, "--num-gpus", 16, "-o", file)
    assert result.returncode == 0, result.stderr
    assert " servers on " in result.stdout
    command = shlex.split(result.stderr.rpartition("next: ")[2])
    written = run(*command[1:])
    assert written.returncode == 0, written.stderr
    assert f"replicas: {command[-1]}\n" in written.stdout
    said = run("estimate", MOE, "--tau", 4.7, "--replicas", 3).stdout
    (line,) = [line for line in said.splitlines() if "3 servers on 24 GPUs: " in line]
    per_gpu = float(line.partition("a GPU at most ")[2].partition(" tokens")[0].replace(",", ""))
    total = float(line.partition("24 GPUs: ")[2].partition(" tokens")[0].replace(",", ""))
    assert total == pytest.approx(24 * per_gpu, rel=0.001)


REFUSED = ("gpt-oss-120b.b200x2.throughput", "gpt-oss-120b.gb10x2.latency")  # attention data parallelism; two nodes
QUICK = ("qwen3-4b.h200x1.latency", "gpt-oss-20b.b200x1.nvfp4")
SLO, SLO_OF_GB10 = 50.0, 20.0
TRAFFIC = Traffic()


def tuned(config: str, slo: float = SLO) -> TunedDeployment:
    return tune_deployment(
        config, TRAFFIC, slo=slo, acceptance=None, tau=4.0, runtime="trtllm", measured=None, target=None, draft=None
    )


def price_of(system: System) -> Price:
    model, profile = StepModel(system, rates(system.gpu, "trtllm")), from_tau(4.0, system.draft.max_draft_tokens)
    return lambda batch, length: point(model, "dflash", profile, TRAFFIC, batch, length).user_rate


def test_drafts_pay_above_the_break_even_share_and_not_below(tmp_path: Path) -> None:
    """At a share half above it drafts are faster at some batch of the schedule, a tenth below it at none."""
    tuning, file = tuned(MOE).tuning, tmp_path / "tuned.yaml"
    file.write_text(tuned(MOE).text)
    _, system = open_system(str(file), "trtllm", None, None)
    model, profile = StepModel(system, rates(system.gpu, "trtllm")), from_tau(4.0, system.draft.max_draft_tokens)
    for share, pays in ((0.9 * tuning.break_even, False), (1.5 * tuning.break_even, True)):
        gains = []
        for batch in (size for size in BATCHES if size <= tuning.best.batch):
            length = next(length for begin, length in reversed(tuning.schedule) if begin <= batch)
            step = point(model, "dflash", profile, TRAFFIC, batch, length).step_seconds
            plain = point(model, "none", None, TRAFFIC, batch, 0).step_seconds
            gains.append((1 + share * length) / step > 1 / plain)
        assert any(gains) == pays


@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.full)
        for n, runtime in SERVED
        if runtime == "trtllm" and n not in REFUSED
    ],
)
def test_a_tuned_file_keeps_the_speed_and_is_not_tuned_again(name: str, tmp_path: Path) -> None:
    slo = SLO_OF_GB10 if ".gb10" in name else SLO
    first = tuned(name, slo)
    file = tmp_path / "tuned.yaml"
    file.write_text(first.text)
    assert tuned(str(file), slo).text == first.text
    deployment, system = open_system(str(file), "trtllm", None, None)
    price = price_of(system)
    schedule = deployment.draft_schedule or ((1, deployment.num_draft_tokens),)
    ends = [begin - 1 for begin, _ in schedule[1:]] + [deployment.max_batch_size]
    for (begin, length), end in zip(schedule, ends, strict=True):
        for batch in {begin, (begin + end) // 2, end}:
            assert price(batch, length) >= slo * (1 - 1e-9), (batch, length)
    promised = first.tuning
    assert promised.user_rate.value == pytest.approx(price(ends[-1], schedule[-1][1]))
    assert promised.gpu_rate.value == pytest.approx(ends[-1] * promised.user_rate.value / system.num_gpus)


def test_schedules_by_hand() -> None:
    """Nine drafts are within 2 % of eight at batch 16, but only eight keep 100 tokens/s."""
    speeds = {1: {8: 290, 9: 300}, 16: {8: 100.2, 9: 98.6}}
    at = lambda batch, length: speeds[1 if batch < 16 else 16][length] - batch * 1e-6  # noqa: E731
    assert schedule_for(at, 16, [8, 9], 100) == ((1, 9), (16, 8))
    assert schedule_for(at, 16, [8, 9], 90) == ((1, 9),)
    # Runtimes draft at most what they begin with
    speeds = {1: {4: 300, 9: 297}, 16: {4: 90, 9: 110}}
    at = lambda batch, length: speeds[1 if batch < 16 else 16][length]  # noqa: E731
    assert schedule_for(at, 16, [4, 9], 100) == ((1, 9),)
    assert schedule_for(at, 16, [4, 9], 310) == ((1, 4),), "where nothing keeps the speed, the best for one user"


def test_the_longest_context_stays_what_the_file_says(tmp_path: Path) -> None:
    """But requests that were asked about fit."""
    usual = tuned(QUICK[0])
    assert "max_seq_len" not in usual.text
    file = tmp_path / "long.yaml"
    source = shipped_deployments()[QUICK[0]].read_text()
    file.write_text(source + "max_seq_len: 32768\n")
    long = tuned(str(file))
    assert "max_seq_len: 32768" in long.text
    file.write_text(source + "max_seq_len: 1024\n")
    assert f"max_seq_len: {TRAFFIC.max_tokens}" in tuned(str(file)).text
    assert long.tuning.best.gpu_rate <= usual.tuning.best.gpu_rate
