# SPDX-License-Identifier: Apache-2.0
"""How many servers: the fewest GPUs for a rate of requests, the most throughput of the GPUs that there are."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.curve import Traffic, from_tau
from dflash_trt.observe.estimate.tuning import Fleet, Tuning, tune
from tests.cli.commands import run
from tests.observe.estimate.systems import MOE, system_of

TRAFFIC, TAU = Traffic(prompt_tokens=1024, output_tokens=512), from_tau(4.7, 9)


def tuned(fleet: Fleet | None, slo: float = 300) -> Tuning:
    return tune({"bf16": system_of(MOE)}, TRAFFIC, TAU, slo, fleet=fleet)


@pytest.mark.parametrize("request_rate", [1.0, 30.0, 200.0])
def test_no_other_candidate_takes_the_rate_on_fewer_gpus(request_rate: float) -> None:
    fleet = Fleet(request_rate=request_rate, output_tokens=512)
    tuning = tuned(fleet)
    best = tuning.best
    assert tuning.replicas * best.batch * best.user_rate >= request_rate * 512
    assert (tuning.replicas - 1) * best.batch * best.user_rate < request_rate * 512  # one server less does not
    fewest = tuning.replicas * best.tensor_parallel
    assert all(fleet.replicas(other) * other.tensor_parallel >= fewest for other in tuning.others)


def test_gpus_without_a_rate_give_the_most_throughput() -> None:
    """Twelve GPUs: three servers of 4 or twelve of 1, whichever is more; of 8 only one, and four idle."""
    fleet = Fleet(num_gpus=12, output_tokens=512)
    tuning = tuned(fleet)
    best = tuning.best
    assert tuning.replicas == 12 // best.tensor_parallel
    total = tuning.replicas * best.batch * best.user_rate
    assert all(12 // o.tensor_parallel * o.batch * o.user_rate <= total for o in tuning.others if fleet.replicas(o))


def test_one_small_server_does_for_a_low_rate() -> None:
    tuning = tuned(Fleet(request_rate=0.1, output_tokens=512), slo=100)
    assert tuning.replicas * tuning.best.tensor_parallel == 1


def test_too_few_gpus_are_refused_with_the_number_that_it_takes() -> None:
    needed = tuned(Fleet(request_rate=500, output_tokens=512))
    num_gpus = needed.replicas * needed.best.tensor_parallel
    with pytest.raises(ConfigError, match=f"expected at least {num_gpus} GPUs for 500 requests/s, found --gpus 8"):
        tuned(Fleet(num_gpus=8, request_rate=500, output_tokens=512))


def test_what_tune_proposes_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    result = run("tune", MOE, "--slo", 300, "--tau", 4.7, "--request-rate", 40, "--gpus", 16, "-o", file)
    assert result.returncode == 0, result.stderr
    assert " servers on " in result.stdout
    command = shlex.split(result.stderr.rpartition("next: ")[2])
    written = run(*command[1:])
    assert written.returncode == 0, written.stderr
    assert f"replicas: {command[-1]}\n" in written.stdout


def test_estimate_multiplies_by_the_servers() -> None:
    said = run("estimate", MOE, "--tau", 4.7, "--replicas", 3).stdout
    (line,) = [line for line in said.splitlines() if "3 servers on 24 GPUs: " in line]
    per_gpu = float(line.partition("a GPU at most ")[2].partition(" tokens")[0].replace(",", ""))
    total = float(line.partition("24 GPUs: ")[2].partition(" tokens")[0].replace(",", ""))
    assert total == pytest.approx(24 * per_gpu, rel=0.001)
    assert json.loads(run("estimate", MOE, "--tau", 4.7, "--replicas", 3, "--json").stdout)["replicas"] == 3
