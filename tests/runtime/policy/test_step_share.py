# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dflash_trt.runtime.policy.step_record import StepRecord
from dflash_trt.runtime.policy.step_share import SLOWDOWN, StepShare

FEW, MANY = "b", "a"


def simulate(policy: StepShare, clients: str, seconds: dict[int, float], num_steps: int) -> tuple[list[bool], float]:
    """Whether all took part in each step, and the mean time of a step, of which those in batches of each size take."""
    joint, total = [], 0.0
    for _ in range(num_steps):
        chosen = policy.choose(clients)
        size = sum(client in chosen for client in clients)
        policy.observe(StepRecord(proposed=[], accepted=[], num_prompt_tokens=0, seconds=seconds[size]))
        joint.append(chosen == frozenset(clients))
        total += seconds[size]
    return joint, total / num_steps


def test_large_batches_that_cost_little_stay_whole() -> None:
    joint, _ = simulate(StepShare(), MANY * 15 + FEW, {1: 0.010, 16: 0.011}, 200)
    assert joint.count(False) <= 200 / 16 + 1, "only to measure them"


def test_large_batches_that_cost_much_slow_the_others_down_to_a_bound() -> None:
    policy = StepShare()
    simulate(policy, MANY * 15, {15: 0.029}, 50)
    joint, mean = simulate(policy, MANY * 15 + FEW, {1: 0.005, 16: 0.030}, 300)
    assert not any(joint[:4]), "a short request ends before the first large step"
    assert 0.9 * SLOWDOWN < mean / 0.005 < 1.02 * SLOWDOWN, "time is split in equal parts"
    assert joint.count(True) > 40


def test_clients_with_as_many_requests_share_every_step() -> None:
    assert all(simulate(StepShare(), MANY * 3 + FEW * 3, {6: 1.0}, 5)[0])
    assert all(simulate(StepShare(), MANY, {1: 1.0}, 5)[0])
    assert StepShare().choose([]) == frozenset()


def test_the_bound_is_that_of_those_who_run_now() -> None:
    """Time saved for another client is not carried over."""
    policy = StepShare()
    simulate(policy, MANY * 15 + FEW, {1: 0.030, 16: 0.030}, 100)
    joint, mean = simulate(policy, MANY * 15 + "c", {1: 0.005, 16: 0.030}, 300)
    assert not any(joint[:4])
    assert mean / 0.005 < 1.02 * SLOWDOWN
