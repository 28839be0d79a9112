# SPDX-License-Identifier: Apache-2.0
"""Independent arrivals through the embedded runtime, beside the simulation: a part of bench_estimate.py.

Over HTTP the simulation needs what a request and a chunk cost outside the decoder. Both are calibrated on requests that
are not among those predicted: `WAVES` of 1 and of 8 at once, each on an idle server.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec
import numpy as np

from dflash_trt.bench.own_server import MODEL, OwnServer
from dflash_trt.cli.output import print_table
from dflash_trt.estimate.acceptance import from_tau
from dflash_trt.estimate.arrivals import Arrival, poisson
from dflash_trt.estimate.constants import Rates
from dflash_trt.estimate.shapes import System
from dflash_trt.estimate.simulation import Server
from dflash_trt.estimate.step import StepModel
from dflash_trt.runtime.decoder import DEFAULT_PREFILL_CHUNK
from dflash_trt.runtime.session import Session
from tests.decoding import greedy
from tests.fixtures_data import prompts
from tests.paths import FIXTURES

CLIENT = Path(__file__).with_name("http_arrivals.py")
LOAD_SLOTS, LOAD_SHARES, LOAD_REQUESTS, MAX_PROMPT = 16, (0.2, 0.4, 0.6), 300, 64
WAVES, WAVE_ROUNDS = (1, 8), 12


class Pair(NamedTuple):
    """What was built, and what is known of it."""

    name: str
    engine: Path
    system: System
    rates: Rates
    length: int
    tau: float


class Seen(NamedTuple):
    """Seconds of one answer."""

    first: float
    """From its arrival to its first token."""
    per_token: float
    per_pass: float
    before: float
    """Of `first`, outside the decoder; 0 where there is nothing outside."""


def under_load(pair: Pair, capacity: float, tokens: int) -> None:
    """Poisson arrivals at several shares of `capacity` requests a second: measured beside simulated."""
    session = Session.open(pair.engine, str(FIXTURES / pair.name), num_slots=LOAD_SLOTS)
    known = [prompt[:MAX_PROMPT] for prompt in prompts(session)]
    session.warm_up(known[0])
    rows, errors = [], []
    os.environ["OMP_NUM_THREADS"] = "1"
    server = OwnServer(
        engine=pair.engine, target=str(FIXTURES / pair.name), draft_length=str(pair.length), max_batch_size=LOAD_SLOTS
    )
    with server.running() as url:
        ask_http(url, [(0.0, known[0])], tokens)
        front_end = _front_end(session, url, known, tokens)
        for share in LOAD_SHARES:
            rate = share * capacity
            times = [arrival.seconds for arrival in poisson(rate, LOAD_REQUESTS / rate, 1, 1)]
            asked = [(at, known[i % len(known)]) for i, at in enumerate(times)]
            for where, seen, rates in (
                ("decoder", _decode(session, asked, tokens, is_waiting=False), pair.rates),
                ("HTTP", ask_http(url, asked, tokens), msgspec.structs.replace(pair.rates, **front_end)),
            ):
                simulated = _simulated(pair, rates, asked, tokens)
                first, per_token = (statistics.median(column) for column in list(zip(*seen, strict=True))[:2])
                cells = []
                for ours, theirs in zip(simulated, (first, per_token), strict=True):
                    cells += [f"{theirs * 1e3:.1f}", f"{ours * 1e3:.1f}", f"{ours / theirs - 1:+.0%}"]
                    errors.append(abs(ours / theirs - 1))
                rows.append((f"{share:.0%} ({rate:.1f}/s)", where, *cells))
    columns = ("load", "through", "TTFT p50, ms", "simulated", "error", "per token p50, ms", "simulated", "error")
    title = f"{pair.name}: {LOAD_REQUESTS} Poisson arrivals, {LOAD_SLOTS} slots, {pair.length} drafts, {tokens} tokens"
    print_table(title, columns, rows)
    within = sum(error <= 0.2 for error in errors)
    click.echo(f"served: largest error {max(errors):.0%}, within 20 %: {within} of {len(errors)} medians\n")


def _front_end(session: Session, url: str, known: Sequence[list[int]], tokens: int) -> dict[str, float]:
    """Seconds of a request before its decoding, and of a chunk beside it, on an idle server."""
    before, excess = [], []
    for size in WAVES:
        pairs = []
        for turn in range(WAVE_ROUNDS):
            wave = [(0.0, known[(turn * size + i) % len(known)]) for i in range(size)]
            served, alone = ask_http(url, wave, tokens), _decode(session, wave, tokens, is_waiting=True)
            pairs.append([statistics.mean(each.per_pass for each in seen) for seen in (served, alone)])
            if size == 1:
                before += [each.before for each in served]
        over_http, in_process = np.median(np.array(pairs), axis=0)
        excess.append((size, float(over_http - in_process)))
        click.echo(f"{size} at once: {over_http * 1e3:.2f} ms a pass over HTTP, {in_process * 1e3:.2f} in process")
    chunk = sum(size * extra for size, extra in excess) / sum(size**2 for size, _ in excess)
    found = {"frontend_request_seconds": statistics.median(before), "frontend_chunk_seconds": max(chunk, 0.0)}
    click.echo("front end, calibrated on an idle server: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()))
    return found


def _simulated(pair: Pair, rates: Rates, asked: Sequence[tuple[float, list[int]]], tokens: int) -> tuple[float, float]:
    """Median seconds to the first token and per token."""
    model = StepModel(msgspec.structs.replace(pair.system, runtime="embedded"), rates)
    acceptance = from_tau(pair.tau, pair.length)
    server = Server(
        model, "dflash", acceptance, lambda batch: pair.length, LOAD_SLOTS, prefill_chunk=DEFAULT_PREFILL_CHUNK
    )
    result = server.run([Arrival(at, len(prompt), tokens) for at, prompt in asked])
    return result.ttft.p50, result.token_interval.p50


def ask_http(url: str, asked: Sequence[tuple[float, list[int]]], tokens: int) -> list[Seen]:
    """Answers of the server to requests that come at given seconds, in wall time as their client saw it."""
    at = urlsplit(url)
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": tokens, "stream": True}
    plan = json.dumps([[seconds, body | {"prompt": prompt}] for seconds, prompt in asked])
    command = [sys.executable, str(CLIENT), str(at.hostname), str(at.port)]
    answers = json.loads(subprocess.run(command, input=plan, capture_output=True, check=True, text=True).stdout)
    return [_seen(answer, tokens) for answer in answers]


def _seen(answer: dict[str, Any], tokens: int) -> Seen:
    times, metrics = answer["times"], answer["last"]["metrics"]
    inside = (metrics["time_to_first_token_ms"] + metrics["queue_time_ms"]) / 1e3
    passes = metrics["speculative_decoding"]["num_spec_steps"]
    decoding = times[-1] - times[0]
    return Seen(times[0], decoding / (tokens - 1), decoding / passes, times[0] - inside)


def _decode(session: Session, asked: Sequence[tuple[float, list[int]]], tokens: int, *, is_waiting: bool) -> list[Seen]:
    """The same without HTTP, on a clock that only steps move: by their wall time (`is_waiting`) or CPU time."""
    now = time.perf_counter if is_waiting else time.process_time
    decoder, clock, upcoming = session.decoder(), 0.0, 0
    seen: list[list[float]] = [[] for _ in asked]
    moved: list[int] = []
    while upcoming < len(asked) or not decoder.is_idle:
        if decoder.is_idle:
            clock = max(clock, asked[upcoming][0])
        while upcoming < len(asked) and asked[upcoming][0] <= clock:
            index, upcoming = upcoming, upcoming + 1
            report = lambda _, index=index: moved.append(index)  # noqa: E731 - bound to this request
            decoder.add(session.request(asked[index][1], greedy(tokens), report))
        begin = now()
        decoder.step()
        clock += now() - begin
        for index in moved:
            seen[index].append(clock)
        moved.clear()
    return [
        Seen(times[0] - at, (times[-1] - times[0]) / (tokens - 1), (times[-1] - times[0]) / (len(times) - 1), 0.0)
        for (at, _), times in zip(asked, seen, strict=True)
    ]
