# SPDX-License-Identifier: Apache-2.0
"""The simulated server: what queueing theory and counting say about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile, from_tau
from dflash_trt.observe.estimate.arrivals import Arrival, poisson, read_trace
from dflash_trt.observe.estimate.shapes import Method
from dflash_trt.observe.estimate.simulation import SimulatedServer, Simulation
from dflash_trt.observe.estimate.step import StepLoad
from tests.cli.commands import run
from tests.observe.estimate.systems import MOE, model_of

TAU = from_tau(4.7, 9)


def served(
    arrivals: list[Arrival],
    *,
    method: Method = "dflash",
    length: Callable[[int], int] = lambda batch: 9,
    acceptance: AcceptanceProfile = TAU,
    max_batch: int = 64,
    slo: float | None = None,
    prefill_chunk: int | None = None,
    runtime: str = "trtllm",
    **changed_rates: float,
) -> Simulation:
    choose = length if method == "dflash" else lambda batch: 0
    model = model_of(MOE, **changed_rates)
    model.system = msgspec.structs.replace(model.system, runtime=runtime)
    return SimulatedServer(model, method, acceptance, choose, max_batch, prefill_chunk=prefill_chunk).run(arrivals, slo)


def test_one_plain_request_by_hand() -> None:
    """11 tokens of output: one comes with the prompt, ten steps give the others."""
    result = served([Arrival(5.0, 256, 11)], method="none")
    model = model_of(MOE)
    prompt = model.price("none", StepLoad(batch=0, draft_tokens=0, context=0, prompt_tokens=256)).seconds
    step = model.price("none", StepLoad(batch=1, draft_tokens=0, context=256)).seconds
    assert result.ttft.p50 == pytest.approx(prompt)
    assert result.token_interval.p50 == pytest.approx(step, rel=1e-4)  # the context grows by ten tokens
    assert result.seconds == pytest.approx(5 + prompt + 10 * step, rel=1e-4)
    assert (result.num_steps, result.tau) == (11, 1.0)


def test_certain_acceptance_gives_the_whole_block() -> None:
    result = served([Arrival(0.0, 10, 1 + 100)], acceptance=AcceptanceProfile((1.0,)))
    assert result.tau == 10
    assert result.num_steps == 1 + 10


def test_tau_is_that_of_the_acceptance() -> None:
    """Requests differ, and the last pass of an answer is cut: a little below the mean's."""
    result = served([Arrival(0.0, 10, 2000)] * 64)
    assert result.tau == pytest.approx(4.7, rel=0.06)


def test_littles_law() -> None:
    """Requests in decoding = arrivals a second x time of their decoding."""
    arrivals = poisson(10, 200, 512, 512)
    result = served(arrivals)
    rate = len(arrivals) / result.seconds
    assert result.mean_batch == pytest.approx(rate * 511 * result.token_interval.p50, rel=0.08)
    assert not result.is_saturated


def test_poisson_load() -> None:
    arrivals = poisson(50, 100, 7, 9)
    assert len(arrivals) == pytest.approx(5000, rel=0.05)
    gaps = [b.seconds - a.seconds for a, b in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)  # as exponentials do
    assert all(a.prompt_tokens == 7 and a.output_tokens == 9 for a in arrivals)


def test_too_many_requests_queue_and_are_all_served() -> None:
    arrivals = poisson(60, 60, 1024, 1024)
    result = served(arrivals, method="none")
    assert result.is_saturated
    assert result.num_requests == len(arrivals)
    assert result.mean_waiting > 64
    assert result.mean_batch <= 64
    assert result.ttft.p99 > 10


def test_more_load_is_never_faster() -> None:
    medians = [served(poisson(rate, 60, 512, 512)).token_interval.p50 for rate in (1, 10, 40)]
    assert medians == sorted(medians)


def test_goodput_counts_users_that_got_their_speed() -> None:
    arrivals = poisson(10, 60, 512, 512)
    free, asked = served(arrivals), served(arrivals, slo=1 / served(arrivals).token_interval.p50)
    assert asked.goodput == pytest.approx(free.goodput / 2, rel=0.1)


def test_long_prompts_come_in_chunks() -> None:
    """40,000 tokens at 16,384 a step: three steps before the first token, and others go on decoding."""
    result = served([Arrival(0.0, 40_000, 1)], method="none")
    assert result.num_steps == 3


def test_a_front_end_of_its_own_is_a_queue_before_and_behind_the_decoder() -> None:
    """Three requests at once, 1 s each to read; a chunk takes 1 ms, and the decoder's steps are as before."""
    arrivals = [Arrival(0.0, 10, 101)] * 3
    slow = {"frontend_request_seconds": 1.0, "frontend_chunk_seconds": 1e-3}
    free, asked = served(arrivals[:1]), served(arrivals, **slow)
    assert asked.ttft.p50 == pytest.approx(2 + free.ttft.p50 + 1e-3)
    assert asked.num_steps > 3 * free.num_steps - 20  # one after the other
    assert asked.chunk_interval.p50 == pytest.approx(free.chunk_interval.p50, rel=1e-3)


def test_a_front_end_on_the_decoders_interpreter_delays_its_steps() -> None:
    """One request: read in 1 s beside no step; then every step sends one chunk, for 1 ms. A second one delays them."""
    slow = {"frontend_request_seconds": 1.0, "frontend_chunk_seconds": 1e-3}
    one, none = [Arrival(0.0, 10, 101)], AcceptanceProfile((0.0,))
    free, asked = (served(one, acceptance=none, runtime="embedded", **each) for each in ({}, slow))
    assert asked.num_steps == free.num_steps == 101
    assert asked.chunk_interval.p50 == pytest.approx(free.chunk_interval.p50 + 1e-3)
    assert asked.ttft.p50 == pytest.approx(1 + free.ttft.p50 + 1e-3)
    second = served([*one, Arrival(1.1, 10, 1)], acceptance=none, runtime="embedded", **slow)
    assert second.seconds == pytest.approx(asked.seconds + 1, abs=0.01)


def test_a_prefill_chunk_bounds_a_step() -> None:
    result = served([Arrival(0.0, 1000, 1)], method="none", prefill_chunk=256)
    assert result.num_steps == 4


def test_shorter_drafts_at_larger_batches() -> None:
    arrivals = [Arrival(0.0, 10, 500)] * 64
    fixed, scheduled = served(arrivals), served(arrivals, length=lambda batch: 9 if batch <= 4 else 2)
    assert scheduled.tau < fixed.tau


def test_the_same_seed_the_same_result() -> None:
    arrivals = poisson(5, 30, 100, 100)
    assert served(arrivals) == served(arrivals)


def test_reading_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 2000, "input_length": 3, "output_length": 4, "hash_ids": [1]}\n'
        '{"timestamp": 500, "input_length": 1, "output_length": 2}\n'
    )
    assert read_trace(file) == [Arrival(0.5, 1, 2), Arrival(2.0, 3, 4)]
    file.write_text('{"timestamp": 0, "input_length": 1, "output_length": 2}\n{"timestamp": 0}\n')
    with pytest.raises(ConfigError, match=r"trace.jsonl:2: expected .*output_length"):
        read_trace(file)
    file.write_text("")
    with pytest.raises(ConfigError, match="expected a trace with requests, found none"):
        read_trace(file)


def test_command(tmp_path: Path) -> None:
    result = run(
        "estimate", MOE, "--tau", "4.7", "--simulate", "poisson:5", "--seconds", "20", "--slo", "300", "--json"
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "dflash-trt/simulation/1"
    assert [entry["method"] for entry in document["simulations"]] == ["none", "dflash"]
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 100, "output_length": 20}\n')
    result = run("estimate", MOE, "--tau", "4.7", "--simulate", str(file))
    assert "TTFT p50 / p90 / p99, ms" in result.stdout


@pytest.mark.parametrize(
    ("load", "code", "words"),
    [
        ("poisson:0", 1, "expected poisson:RATE with requests/s above 0"),
        ("poisson:x", 1, "expected poisson:RATE with requests/s above 0"),
        ("poisson:1e9", 1, "expected at most 1,000,000 requests, found 1e+09 requests/s for 600 s"),
        ("nowhere.jsonl", 1, "nowhere.jsonl: expected a trace, or poisson:RATE"),
    ],
)
def test_refused_loads(load: str, code: int, words: str) -> None:
    result = run("estimate", MOE, "--tau", "4.7", "--simulate", load)
    assert result.returncode == code
    assert words in " ".join(result.stderr.split())
