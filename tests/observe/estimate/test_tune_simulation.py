# SPDX-License-Identifier: Apache-2.0
"""The speed that was asked for is what users get of the file that `tune` writes, request by request.

A server with as many users as the file allows: each step takes its service time, each request's accepted tokens are
drawn, and a request that ends is replaced by one whose prompt joins the next step. Service times are the cost model's,
or what others measured on a GB10.
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_trt.deploy.deployment_file import load_deployment
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import Runtime
from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile, from_tau
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.curve import Traffic
from dflash_trt.observe.estimate.inputs import open_system
from dflash_trt.observe.estimate.measured_points import MeasuredPoint, MeasuredPoints
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.observe.estimate.step_cost import StepLoad
from dflash_trt.observe.estimate.tuned_deployment import tune_deployment
from dflash_trt.observe.estimate.tuning import tune

Service = Callable[[int, int, int], float]
"""Seconds of a step by requests, draft length and prompts that join it."""
TRAFFIC = Traffic(prompt_tokens=512, output_tokens=512)
CHANCE = 0.03
NUM_REQUESTS = 8
"""Requests of each user."""


def user_speed(schedule: dict[int, int], users: int, service: Service, acceptance: AcceptanceProfile) -> float:
    """Median over requests of their tokens a second."""
    draw, now, joining = random.Random(1), 0.0, 0
    starts = sorted(schedule)
    length = schedule[starts[bisect_right(starts, users) - 1]]
    # Users are at different places of their answers, as those of a server that has run for a while.
    left = [draw.randint(1, TRAFFIC.output_tokens) for _ in range(users)]
    begun, speeds = [None] * users, list[float]()
    while len(speeds) < NUM_REQUESTS * users:
        now += service(users, length, joining)
        joining = 0
        for user in range(users):
            left[user] -= 1 + accepted(acceptance, length, draw)
            if left[user] > 0:
                continue
            if (start := begun[user]) is not None:
                speeds.append(TRAFFIC.output_tokens / (now - start))
            begun[user], left[user] = now, TRAFFIC.output_tokens  # type: ignore[call-overload]
            joining += 1
    return statistics.median(speeds)


def accepted(acceptance: AcceptanceProfile, length: int, draw: random.Random) -> int:
    for position in range(length):
        if draw.random() >= acceptance.shares[min(position, len(acceptance.shares) - 1)]:
            return position
    return length


def model_service(name: str, runtime: Runtime, **changes: object) -> Service:
    """The cost model's steps, each prompt whole in the step that it joins."""
    system = open_system(name, runtime, None, None, **changes)[1]
    model, known = StepModel(system, rates(system.gpu, runtime)), dict[tuple[int, int, int], float]()

    def service(batch: int, length: int, prompts: int) -> float:
        if (key := (batch, length, prompts)) not in known:
            load = StepLoad(
                batch=batch, num_draft_tokens=length, context=TRAFFIC.mean_context,
                prompt_tokens=prompts * TRAFFIC.prompt_tokens, prompts=prompts,
            )  # fmt: skip
            known[key] = model.price("dflash", load).seconds
        return known[key]

    return service


def written(text: str, tmp_path: Path) -> ResolvedDeployment:
    file = tmp_path / "tuned.yaml"
    file.write_text(text)
    return resolve(load_deployment(file), "tuned")


@pytest.mark.parametrize(
    ("name", "tau", "slo"),
    [
        ("qwen3-8b.rtx5090x1.latency", 6.5, 150), ("gpt-oss-20b.gb10x1.latency", 3.5, 50),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("qwen3.6-35b-a3b.gb10x1.latency", 5.0, 40), ("qwen3-8b.l40sx1.latency", 6.5, 100),
                ("qwen3.6-27b.rtxpro6000x1.latency", 5.0, 60), ("gpt-oss-120b.rtxpro6000x1.latency", 4.7, 100),
            )
        ),
    ],
)  # fmt: skip
def test_users_get_the_speed_of_the_file(name: str, tau: float, slo: float, tmp_path: Path) -> None:
    tuned = tune_deployment(
        name, TRAFFIC, slo=slo, acceptance=None, tau=tau, runtime="vllm", measured=None, target=None, draft=None
    )
    file = written(tuned.text, tmp_path)
    draft = open_system(name, "vllm", None, None, num_draft_tokens=None)[1].draft
    schedule = dict(file.draft_schedule or {1: file.num_draft_tokens})
    service = model_service(name, "vllm", recipe=file.file.recipe)
    acceptance = from_tau(tau, draft.max_draft_tokens)
    speed = user_speed(schedule, file.max_batch_size, service, acceptance)
    assert speed >= slo * (1 - CHANCE)
    assert speed == pytest.approx(tuned.tuning.best.user_rate, rel=0.1)
    if tuned.tuning.best.limit == "speed":
        more = user_speed(schedule, 2 * file.max_batch_size, service, acceptance)
        assert more < slo, "a batch as small as half of what the speed allows would keep it, too"


GB10 = ((1, 36.7), (8, 108.9 / 8))
"""Users, and what each got: Qwen3.8-27B in NVFP4 with DSpark in SGLang (hasso5703/dgx-spark-qwen38 @ 0a3458b)."""


@pytest.mark.parametrize("slo", [16, 20, 30])
def test_users_get_the_speed_with_measured_service_times(slo: float) -> None:
    """A step takes tau tokens over the speed that was measured; between two batches, in proportion."""
    acceptance = from_tau(3.3, 7)
    system = open_system("qwen3.8-27b.h200x1.latency", "sglang", None, None)[1]
    points = MeasuredPoints(tuple(MeasuredPoint(users, 7, speed) for users, speed in GB10))
    tuning = tune({"bf16": system}, TRAFFIC, acceptance, slo, measured=points, lengths=[7], is_scheduled=False)
    (few, fast), (many, slow) = GB10

    def service(batch: int, _: int, __: int) -> float:
        share = (batch - few) / (many - few)
        return acceptance.tau(7) * ((1 - share) / fast + share / slow)

    assert user_speed({1: 7}, tuning.best.batch, service, acceptance) >= slo * (1 - CHANCE)
    assert user_speed({1: 7}, tuning.best.batch + 1, service, acceptance) < slo * (1 + CHANCE)
