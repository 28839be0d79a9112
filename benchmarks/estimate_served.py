# SPDX-License-Identifier: Apache-2.0
"""Independent arrivals through the embedded runtime, beside the simulation: a part of bench_estimate.py.

Over HTTP the simulation needs what a request and a chunk cost the server's other thread, which shares the decoder's
interpreter: its CPU time (Linux's /proc), for requests that are not among those predicted, from one client and from
several at once, with one chunk and with many.
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

from dflash_trt.cli.output import print_table
from dflash_trt.observe.bench.own_server import MODEL, OwnServer
from dflash_trt.observe.estimate.acceptance_profile import from_tau
from dflash_trt.observe.estimate.arrivals import Arrival, poisson
from dflash_trt.observe.estimate.constants import Rates
from dflash_trt.observe.estimate.shapes import System
from dflash_trt.observe.estimate.simulation import SimulatedServer
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.runtime.load import open_session
from dflash_trt.runtime.options import DEFAULTS, RuntimeOptions
from dflash_trt.runtime.session import Session
from tests.decoding import greedy
from tests.fixtures_data import prompts
from tests.paths import FIXTURES

CLIENT = Path(__file__).with_name("http_arrivals.py")
LOAD_SLOTS, LOAD_SHARES, LOAD_REQUESTS, MAX_PROMPT = 16, (0.2, 0.4, 0.6), 300, 64
WAVES = ((1, 24), (8, 10))
"""Clients at once, and how often."""


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


def under_load(pair: Pair, capacity: float, tokens: int) -> None:
    """Poisson arrivals at several shares of `capacity` requests a second: measured beside simulated."""
    session = open_session(pair.engine, str(FIXTURES / pair.name), RuntimeOptions(max_batch_size=LOAD_SLOTS))
    known = [prompt[:MAX_PROMPT] for prompt in prompts(session)]
    session.warm_up(known[0])
    rows, errors = [], []
    os.environ["OMP_NUM_THREADS"] = "1"
    server = OwnServer(
        engine=pair.engine, target=str(FIXTURES / pair.name), draft_length=str(pair.length), max_batch_size=LOAD_SLOTS
    )
    with server.running() as url:
        ask_http(url, [(0.0, known[0])], tokens)
        front_end, latency = _front_end(url, known, tokens)
        for share in LOAD_SHARES:
            rate = share * capacity
            times = [arrival.seconds for arrival in poisson(rate, LOAD_REQUESTS / rate, 1, 1)]
            asked = [(at, known[i % len(known)]) for i, at in enumerate(times)]
            for where, seen, rates, later in (
                ("decoder", _decode(session, asked, tokens), pair.rates, 0.0),
                ("HTTP", ask_http(url, asked, tokens), msgspec.structs.replace(pair.rates, **front_end), latency),
            ):
                simulated = _simulated(pair, rates, asked, tokens, later)
                first, per_token = (statistics.median(column) for column in zip(*seen, strict=True))
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


def _front_end(url: str, known: Sequence[list[int]], tokens: int) -> tuple[dict[str, float], float]:
    """CPU seconds of the server's main thread for a request and for a chunk: least squares over all waves.

    And what a request alone waits besides, outside server and decoder: for threads to wake, and the loopback.
    """
    server, rows, seconds, idle = _server_process(), [], [], []
    for size, rounds in WAVES:
        for length in (1, tokens):
            begin, requests, chunks = _main_thread_seconds(server), 0, 0
            for turn in range(rounds):
                wave = [(0.0, known[(turn * size + i) % len(known)]) for i in range(size)]
                answers = _post(url, wave, length)
                requests, chunks = requests + size, chunks + sum(len(answer["times"]) for answer in answers)
                if (size, length) == (1, tokens):
                    idle.append(answers[0]["times"][0] - _inside(answers[0]))
            rows.append((requests, chunks))
            seconds.append(_main_thread_seconds(server) - begin)
    (request, chunk), *_ = np.linalg.lstsq(np.array(rows, dtype=float), np.array(seconds), rcond=None)
    click.echo(
        f"front end: {request * 1e3:.2f} ms of CPU a request, {chunk * 1e3:.2f} ms a chunk; one request alone waits"
        f" {statistics.median(idle) * 1e3:.2f} ms outside the decoder"
    )
    found = {"frontend_request_seconds": max(float(request), 0.0), "frontend_chunk_seconds": max(float(chunk), 0.0)}
    return found, max(0.0, statistics.median(idle) - sum(found.values()))


def _server_process() -> int:
    """The child that serves."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            words = stat.with_name("cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if parent == os.getpid() and b"serve" in words:
            return int(stat.parent.name)
    raise SystemExit("expected a child that serves in /proc, found none: this benchmark needs Linux")


def _main_thread_seconds(process: int) -> float:
    """CPU seconds of a process's main thread; of a server, all that is not the decoder."""
    fields = Path(f"/proc/{process}/task/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _simulated(
    pair: Pair, rates: Rates, asked: Sequence[tuple[float, list[int]]], tokens: int, latency: float
) -> tuple[float, float]:
    """Median seconds to the first token, `latency` included, and per token."""
    model = StepModel(pair.system, rates)
    acceptance = from_tau(pair.tau, pair.length)
    server = SimulatedServer(
        model, "dflash", acceptance, lambda batch: pair.length, LOAD_SLOTS, prefill_chunk=DEFAULTS.prefill_chunk
    )
    result = server.run([Arrival(at, len(prompt), tokens) for at, prompt in asked])
    return latency + result.ttft.p50, result.token_interval.p50


def ask_http(url: str, asked: Sequence[tuple[float, list[int]]], tokens: int) -> list[Seen]:
    """What their client saw of requests that come at given seconds, in wall time."""
    answers = _post(url, asked, tokens)
    return [Seen(times[0], (times[-1] - times[0]) / (tokens - 1)) for times in (a["times"] for a in answers)]


def _post(url: str, asked: Sequence[tuple[float, list[int]]], tokens: int) -> list[dict[str, Any]]:
    at = urlsplit(url)
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": tokens, "stream": True}
    plan = json.dumps([[seconds, body | {"prompt": prompt}] for seconds, prompt in asked])
    command = [sys.executable, str(CLIENT), str(at.hostname), str(at.port)]
    answers: list[dict[str, Any]] = json.loads(
        subprocess.run(command, input=plan, stdout=subprocess.PIPE, check=True, text=True).stdout
    )
    return answers


def _inside(answer: dict[str, Any]) -> float:
    """Seconds to the first token as the decoder counts them."""
    metrics = answer["last"]["metrics"]
    return float(metrics["time_to_first_token_ms"] + metrics["queue_time_ms"]) / 1e3


def _decode(session: Session, asked: Sequence[tuple[float, list[int]]], tokens: int) -> list[Seen]:
    """The same without HTTP, on a clock that only steps move, by their CPU time."""
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
        begin = time.process_time()
        decoder.step()
        clock += time.process_time() - begin
        for index in moved:
            seen[index].append(clock)
        moved.clear()
    return [
        Seen(times[0] - at, (times[-1] - times[0]) / (tokens - 1)) for (at, _), times in zip(asked, seen, strict=True)
    ]
