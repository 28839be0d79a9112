# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt estimate --simulate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.cli.output import print_json, print_table
from dflash_trt.errors import ConfigError

if TYPE_CHECKING:
    from dflash_trt.deploy.resolve import ResolvedDeployment
    from dflash_trt.observe.estimate.acceptance_profile import Acceptance
    from dflash_trt.observe.estimate.arrivals import Arrival
    from dflash_trt.observe.estimate.curve import Traffic
    from dflash_trt.observe.estimate.shapes import Method, System
    from dflash_trt.observe.estimate.simulation import Percentiles, Simulation

TITLES = {"none": "plain", "dflash": "DFlash"}
MAX_REQUESTS = 1_000_000
FRONT_END = ("frontend_request_seconds", "frontend_chunk_seconds")
"""Constants that no GPU server was measured for: the load is run with both ends of their range."""


def simulate_load(
    deployment: ResolvedDeployment,
    system: System,
    acceptance: Acceptance,
    load: str,
    traffic: Traffic,
    seconds: float,
    slo: float | None,
) -> list[tuple[Simulation, Simulation]]:
    """The deployment under `load`, plain and with DFlash, each also behind the slowest front end of the constants.

    Raises ConfigError for a load that is none, requests longer than the deployment takes, and memory for none of them.
    """
    from dflash_trt.observe.estimate.batch_limit import batch_limit
    from dflash_trt.observe.estimate.constants import rates
    from dflash_trt.observe.estimate.simulation import Server
    from dflash_trt.observe.estimate.step import StepModel

    arrivals = _arrivals(load, traffic, seconds)
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals)
    if longest > system.max_seq_len:
        raise ConfigError(
            f"--simulate: expected requests of at most max_seq_len {system.max_seq_len} tokens, found one of {longest}"
        )
    nominal = rates(system.gpu, system.runtime)
    slow = rates(system.gpu, system.runtime, dict.fromkeys(FRONT_END, "high"))
    runs = []
    methods: tuple[Method, ...] = ("none", "dflash")
    for method in methods:
        limit = batch_limit(system, method, longest)
        if not limit.batch:
            raise ConfigError(f"--simulate: expected memory for one request, found none: {limit.reason}")
        slots = min(limit.batch, system.max_batch_size)
        choose = _choice(deployment) if method == "dflash" else lambda batch: 0
        fast, late = (
            Server(StepModel(system, each), method, acceptance, choose, slots).run(arrivals, slo)
            for each in (nominal, slow)
        )
        runs.append((fast, late))
    return runs


def print_simulations(
    name: str, load: str, source: str, slo: float | None, runs: list[tuple[Simulation, Simulation]], *, as_json: bool
) -> None:
    """One column for each method."""
    if as_json:
        fast, slow = ([run[index] for run in runs] for index in (0, 1))
        document: dict[str, object] = {"name": name, "load": load, "acceptance_source": source, "slo": slo}
        print_json("simulation", document | {"simulations": fast, "slow_front_end": slow})
        return
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
    rows = [(title, *(value(run) for run, _ in runs)) for title, value in lines]
    rows += [(f"slow front end: {title}", *(value(slow) for _, slow in runs)) for title, value in lines[1:3]]
    print_table(f"{name} under {load}; {source}", ("", *(TITLES[run.method] for run, _ in runs)), rows)


def _arrivals(load: str, traffic: Traffic, seconds: float) -> list[Arrival]:
    from dflash_trt.observe.estimate.arrivals import poisson, read_trace

    if not load.startswith("poisson:"):
        return read_trace(Path(load))
    try:
        rate = float(load.removeprefix("poisson:"))
    except ValueError:
        rate = 0.0
    if not 0 < rate * seconds <= MAX_REQUESTS:
        raise click.UsageError(f"--simulate: expected poisson:RATE with requests/s above 0, found {load}")
    arrivals = poisson(rate, seconds, traffic.prompt_tokens, traffic.output_tokens)
    if not arrivals:
        raise click.UsageError(f"--simulate: expected a load with requests in {seconds:g} s, found none in {load}")
    return arrivals


def _choice(deployment: ResolvedDeployment) -> Callable[[int], int]:
    """Drafts by batch, as the deployment says."""
    schedule = deployment.draft_schedule or ((1, deployment.draft_tokens),)

    def choose(batch: int) -> int:
        return [length for begin, length in schedule if begin <= batch][-1]

    return choose


def _milliseconds(values: Percentiles) -> str:
    seconds = (values.p50, values.p90, values.p99)
    return " / ".join(f"{value * 1e3:.1f}" if value < 10 else f"{value * 1e3:.0f}" for value in seconds)
