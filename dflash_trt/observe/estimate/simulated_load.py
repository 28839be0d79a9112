# SPDX-License-Identifier: Apache-2.0
"""A deployment under a load, plain and with DFlash: what `dflash-trt estimate --simulate` predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile
from dflash_trt.observe.estimate.arrivals import Arrival, poisson, read_trace
from dflash_trt.observe.estimate.batch_limit import batch_limit
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.curve import Traffic
from dflash_trt.observe.estimate.shapes import Method, System
from dflash_trt.observe.estimate.simulation import Percentiles, SimulatedServer, Simulation
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.observe.pages.table import Table
from dflash_trt.observe.plots.methods import TITLES

MAX_REQUESTS = 1_000_000
FRONT_END = ("frontend_request_seconds", "frontend_chunk_seconds")
"""Constants that no GPU server was measured for: the load is run with both ends of their range."""
METHODS: tuple[Method, ...] = ("none", "dflash")


class SimulatedMethod(msgspec.Struct, frozen=True):
    """One method under the load."""

    simulation: Simulation
    slow_front_end: Simulation
    """Behind the slowest front end of the constants."""


def open_load(text: str, traffic: Traffic, seconds: float) -> list[Arrival]:
    """`poisson:RATE` for so many seconds, or the trace in a file; raises ConfigError for what is neither."""
    if not text.startswith("poisson:"):
        return read_trace(Path(text))
    try:
        rate = float(text.removeprefix("poisson:"))
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ConfigError(f"--simulate: expected poisson:RATE with requests/s above 0, found {text}")
    if rate * seconds > MAX_REQUESTS:
        raise ConfigError(
            f"--simulate: expected at most {MAX_REQUESTS:,} requests, found {rate:g} requests/s for {seconds:g} s",
            hint="a lower rate, or fewer --seconds",
        )
    arrivals = poisson(rate, seconds, traffic.prompt_tokens, traffic.output_tokens)
    if not arrivals:
        raise ConfigError(f"--simulate: no request in {seconds:g} s of {text}", hint="more --seconds")
    return arrivals


def simulate_load(
    deployment: ResolvedDeployment,
    system: System,
    acceptance: AcceptanceProfile,
    arrivals: Sequence[Arrival],
    slo: float | None,
) -> list[SimulatedMethod]:
    """Each method; raises ConfigError for requests longer than the deployment takes, and memory for none of them."""
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals)
    if longest > system.max_seq_len:
        raise ConfigError(
            f"--simulate: expected requests of at most max_seq_len {system.max_seq_len} tokens, found one of {longest}"
        )
    nominal = rates(system.gpu, system.runtime)
    slow = rates(system.gpu, system.runtime, dict.fromkeys(FRONT_END, "high"))
    runs = []
    for method in METHODS:
        limit = batch_limit(system, method, longest)
        if not limit.batch:
            raise ConfigError(f"--simulate: expected memory for one request, found none: {limit.reason}")
        slots = min(limit.batch, system.max_batch_size)
        length_of = _draft_length(deployment) if method == "dflash" else lambda batch: 0
        servers = (
            SimulatedServer(StepModel(system, each), method, acceptance, length_of, slots) for each in (nominal, slow)
        )  # fmt: skip
        runs.append(SimulatedMethod(*(server.run(arrivals, slo) for server in servers)))
    return runs


def simulation_table(title: str, runs: Sequence[SimulatedMethod], slo: float | None) -> Table:
    """One column for each method."""
    goodput = "goodput, requests/s" if slo is None else f"goodput at {slo:g} tokens/s/user, requests/s"
    lines: list[tuple[str, Callable[[Simulation], str]]] = [
        ("requests", lambda run: str(run.num_requests)),
        ("TTFT p50 / p90 / p99, ms", lambda run: _milliseconds(run.ttft)),
        ("time per output token p50 / p90 / p99, ms", lambda run: _milliseconds(run.token_interval)),
        ("between deliveries p50 / p90 / p99, ms", lambda run: _milliseconds(run.chunk_interval)),
        ("output tokens/s", lambda run: f"{run.output_rate:.0f}"),
        (goodput, lambda run: f"{run.goodput:.2f}"),
        ("requests decoding, mean", lambda run: f"{run.mean_batch:.1f}"),
        ("requests waiting, mean / most", lambda run: f"{run.mean_waiting:.1f} / {run.max_waiting}"),
        ("tokens a pass", lambda run: f"{run.tau:.2f}"),
        ("state", lambda run: "saturated: the queue grows" if run.is_saturated else "steady"),
    ]
    rows = [(name, *(value(run.simulation) for run in runs)) for name, value in lines]
    rows += [(f"slow front end: {name}", *(value(run.slow_front_end) for run in runs)) for name, value in lines[1:3]]
    columns = ("", *(TITLES[run.simulation.method] for run in runs))
    return Table(title=title, columns=columns, rows=tuple(rows))


def _draft_length(deployment: ResolvedDeployment) -> Callable[[int], int]:
    """Drafts by batch, as the deployment says."""
    schedule = deployment.draft_schedule or ((1, deployment.draft_tokens),)
    return lambda batch: [length for begin, length in schedule if begin <= batch][-1]


def _milliseconds(values: Percentiles) -> str:
    seconds = (values.p50, values.p90, values.p99)
    return " / ".join(f"{value * 1e3:.1f}" if value < 10 else f"{value * 1e3:.0f}" for value in seconds)
