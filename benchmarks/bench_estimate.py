# SPDX-License-Identifier: Apache-2.0
"""Does the cost model predict the embedded runtime on this CPU? Measured steps against predicted ones.

Every batch size decodes with every draft length. A quarter of the combinations fits eight constants of the model for
this CPU (a kernel's floor, arithmetic, experts, host work), the same model then predicts the others. Steps are counted
in CPU seconds of one thread, so that other work on the machine disturbs less; only steps with a full batch that
decodes count, and those in which one request's prompt joins. Then loads of independent arrivals: on a clock of CPU
seconds through the decoder itself, and over HTTP through `dflash-trt serve`, both beside the simulation with those
constants. The served times are wall time: run it on a quiet machine. Prints tables, asserts nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec
import numpy as np
import torch
from transformers.utils import logging

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.bench.own_server import MODEL, OwnServer  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.doctor import cpu_model  # noqa: E402
from dflash_trt.endpoints.client import Client  # noqa: E402
from dflash_trt.estimate.acceptance import from_tau  # noqa: E402
from dflash_trt.estimate.arrivals import Arrival, poisson  # noqa: E402
from dflash_trt.estimate.constants import Rates  # noqa: E402
from dflash_trt.estimate.inputs import draft_shape, eagle3_shape, target_shape  # noqa: E402
from dflash_trt.estimate.shapes import System  # noqa: E402
from dflash_trt.estimate.simulation import Server  # noqa: E402
from dflash_trt.estimate.step import Load, StepModel  # noqa: E402
from dflash_trt.runtime.decoder import DEFAULT_PREFILL_CHUNK  # noqa: E402
from dflash_trt.runtime.draft_length import FixedLength  # noqa: E402
from dflash_trt.runtime.session import Session  # noqa: E402
from tests.decoding import greedy  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.fixtures_data import PAIRS, prompts  # noqa: E402
from tests.paths import FIXTURES  # noqa: E402

Way = tuple[int, int]
"""Batch and draft length."""
BATCHES, MAX_PROMPT = (1, 2, 4, 8, 16, 32), 64
LOAD_SLOTS, LOAD_SHARES, LOAD_REQUESTS = 16, (0.2, 0.4, 0.6), 200
CALIBRATION_BATCHES, CALIBRATION_LENGTHS = (1, 8, 32), (0, 1, 4, 7)
PROMPT_BATCHES = (0, 3, 12)
"""Requests that decode in the steps in which one more request's prompt is read; all of them calibrate."""
# Rates that the CPU's caches and single thread make irrelevant are out of the way; the others start here.
START = {
    "gemm_seconds": 2e-5, "compute_efficiency": 0.1, "moe_kernel_seconds": 1e-4, "moe_bandwidth_efficiency": 0.01,
    "host_plain_seconds": 5e-4, "host_speculative_seconds": 1e-3, "host_request_seconds": 1e-5,
    "host_speculative_request_seconds": 5e-5,
}  # fmt: skip


@click.command()
@click.option("--tokens", default=32, show_default=True, help="New tokens a request.")
@click.option("--rounds", default=4, show_default=True, help="Of every batch and draft length.")
@click.option("--points", type=click.Path(path_type=Path), help="Write the first pair's points for `tune --from`.")
def main(tokens: int, rounds: int, points: Path | None) -> None:
    """Measure, fit, predict."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    click.echo(f"{cpu_model()}, one thread, torch {torch.__version__}; {tokens} tokens a request, {rounds} rounds\n")
    for name in PAIRS:
        with tempfile.TemporaryDirectory() as directory:
            engine = Path(directory) / "engine"
            build(FIXTURES / f"{name}-dflash", engine, FIXTURES / name)
            measured, taus, context = _measure(engine, name, tokens, rounds)
            fitted = _report(name, measured, _prompt_steps(engine, name, tokens, rounds), context)
            _under_load(engine, name, fitted, measured, taus, tokens)
        if points is not None and name == PAIRS[0]:
            rows = [
                {"batch": batch, "draft_tokens": length, "user_rate": taus[batch, length] / seconds}
                for (batch, length), seconds in measured.items()
            ]
            points.write_text(json.dumps({"schema": "dflash-trt/points/1", "points": rows}))


def _measure(engine: Path, name: str, tokens: int, rounds: int) -> tuple[dict[Way, float], dict[Way, float], float]:
    """CPU seconds of a step by batch and draft length, tokens a pass, and the mean context.

    Every way has its turn in each round, and the lower quartile of its steps counts: what else the machine does comes
    in bursts, and only ever adds.
    """
    sessions = {batch: Session.open(engine, str(FIXTURES / name), num_slots=batch) for batch in BATCHES}
    known = [prompt[:MAX_PROMPT] for prompt in prompts(sessions[1])]
    steps: dict[Way, list[float]] = {}
    taus: dict[Way, float] = {}
    for _ in range(rounds):
        for batch, session in sessions.items():
            for length in range(session.manifest.draft.num_draft_tokens + 1):
                chosen = [known[index % len(known)] for index in range(batch)]
                seconds, taus[batch, length] = _steps(session, chosen, length, tokens)
                steps.setdefault((batch, length), []).extend(seconds)
    context = statistics.mean(map(len, known)) + tokens / 2
    return {way: float(np.quantile(values, 0.25)) for way, values in steps.items()}, taus, context


def _steps(session: Session, chosen: list[list[int]], length: int, tokens: int) -> tuple[list[float], float]:
    """Seconds of every step in which all of `chosen` decode with `length` drafts, and the tokens of a pass."""
    decoder = session.decoder(FixedLength(length)) if length else session.plain_decoder()
    for prompt in chosen:
        decoder.add(session.request(prompt, greedy(tokens)))
    seconds = []
    while not decoder.is_idle:
        running = decoder.running.values()
        is_full = len(running) == len(chosen) and all(r.is_prefilled and r.remaining > length for r in running)
        begin = time.process_time()
        decoder.step()
        if is_full:
            seconds.append(time.process_time() - begin)
    return seconds, decoder.metrics().tau or 1.0


def _prompt_steps(engine: Path, name: str, tokens: int, rounds: int) -> dict[Load, float]:
    """CPU seconds of the step that reads a whole prompt, beside so many requests that verify whole blocks."""
    session = Session.open(engine, str(FIXTURES / name), num_slots=LOAD_SLOTS)
    length = session.manifest.draft.num_draft_tokens
    known = [prompt[:MAX_PROMPT] for prompt in prompts(session)]
    steps: dict[tuple[int, int], list[float]] = {}
    for turn in range(4 * rounds):
        for batch in PROMPT_BATCHES:
            decoder = session.decoder(FixedLength(length))
            for index in range(batch):
                decoder.add(session.request(known[(turn + index) % len(known)], greedy(tokens)))
            while any(not r.is_prefilled for r in decoder.running.values()) or len(decoder.running) < batch:
                decoder.step()
            late = known[(turn + batch) % len(known)]
            decoder.add(session.request(late, greedy(tokens)))
            begin = time.process_time()
            decoder.step()
            steps.setdefault((batch, len(late)), []).append(time.process_time() - begin)
            while not decoder.is_idle:
                decoder.step()
    return {
        Load(batch=batch, draft_tokens=length, context=MAX_PROMPT, prompt_tokens=size): min(seconds)
        for (batch, size), seconds in steps.items()
    }


def _report(name: str, measured: dict[Way, float], prompt_steps: dict[Load, float], context: float) -> Rates:
    system = _system(name)
    calibration = [way for way in measured if way[0] in CALIBRATION_BATCHES and way[1] in CALIBRATION_LENGTHS]
    fitted = _fit(system, {_load(way, context): measured[way] for way in calibration} | prompt_steps)
    predicted = {way: _predict(system, fitted, _load(way, context)) for way in measured}
    lengths = sorted({length for _, length in measured})
    rows = []
    for batch in sorted({batch for batch, _ in measured}):
        cells = []
        for length in lengths:
            mark = "*" if (batch, length) in calibration else ""
            ours, theirs = predicted[batch, length], measured[batch, length]
            cells.append(f"{theirs * 1e3:.1f} {ours / theirs - 1:+.0%}{mark}")
        rows.append((str(batch), *cells))
    print_table(
        f"{name}: ms a step and the model's error, by batch and draft length; * calibration",
        ("batch", *(str(length) for length in lengths)), rows,
    )  # fmt: skip
    errors = [abs(predicted[way] / measured[way] - 1) for way in measured if way not in calibration]
    within = sum(error <= 0.15 for error in errors)
    click.echo(
        f"predicted, not fitted: {len(errors)} steps, median error {statistics.median(errors):.1%}, largest"
        f" {max(errors):.1%}, within 15 %: {within}"
    )
    misses = [_predict(system, fitted, load) / seconds - 1 for load, seconds in prompt_steps.items()]
    click.echo(f"fitted: {len(misses)} steps with a prompt, errors {min(misses):+.0%} to {max(misses):+.0%}")
    rates = ", ".join(f"{key} {getattr(fitted, key):.3g}" for key in START)
    click.echo(f"constants: {rates}\n")
    return fitted


def _under_load(
    engine: Path, name: str, fitted: Rates, measured: dict[Way, float], taus: dict[Way, float], tokens: int
) -> None:
    """Poisson arrivals at several shares of what a full batch could serve: measured beside simulated."""
    session = Session.open(engine, str(FIXTURES / name), num_slots=LOAD_SLOTS)
    length = session.manifest.draft.num_draft_tokens
    known = [prompt[:MAX_PROMPT] for prompt in prompts(session)]
    session.warm_up(known[0])
    way = (LOAD_SLOTS, length)
    capacity = LOAD_SLOTS * taus[way] / measured[way] / tokens
    chunk = DEFAULT_PREFILL_CHUNK + LOAD_SLOTS * (length + 1)
    model = StepModel(msgspec.structs.replace(_system(name), max_num_tokens=chunk), fitted)
    rows = []
    for share in LOAD_SHARES:
        times = [arrival.seconds for arrival in poisson(share * capacity, LOAD_REQUESTS / (share * capacity), 1, 1)]
        arrivals = [Arrival(at, len(known[i % len(known)]), tokens) for i, at in enumerate(times)]
        token_prompts = [known[i % len(known)] for i in range(len(arrivals))]
        acceptance = from_tau(taus[way], length)
        simulated = Server(model, "dflash", acceptance, lambda batch: length, LOAD_SLOTS).run(arrivals)
        load = f"{share:.0%} ({share * capacity:.1f}/s)"
        for where, (first, interval) in {
            "decoder": _serve(session, arrivals, token_prompts),
            "HTTP": _serve_http(engine, name, length, arrivals, token_prompts),
        }.items():
            cells = []
            for ours, theirs in ((simulated.ttft.p50, first), (simulated.token_interval.p50, interval)):
                cells += [f"{theirs * 1e3:.1f}", f"{ours * 1e3:.1f}", f"{ours / theirs - 1:+.0%}"]
            rows.append((load, where, *cells))
    columns = ("load", "through", "TTFT p50, ms", "simulated", "error", "per token p50, ms", "simulated", "error")
    print_table(
        f"{name}: {LOAD_REQUESTS} Poisson arrivals, {LOAD_SLOTS} slots, {length} drafts, {tokens} tokens", columns, rows
    )
    click.echo()


def _serve_http(
    engine: Path, name: str, length: int, arrivals: list[Arrival], token_prompts: list[list[int]]
) -> tuple[float, float]:
    """The same medians as a client of `dflash-trt serve` sees them, in wall time."""
    server = OwnServer(engine=engine, target=str(FIXTURES / name), draft_length=str(length), max_batch_size=LOAD_SLOTS)
    os.environ["OMP_NUM_THREADS"] = "1"
    with server.running() as url, Client(url) as client, ThreadPoolExecutor(64) as pool:

        def ask(index: int) -> tuple[float, float]:
            body = {"model": MODEL, "prompt": token_prompts[index], "temperature": 0, "ignore_eos": True}
            answer = client.answer(body | {"max_tokens": arrivals[index].output_tokens}, is_chat=False)
            assert answer.ttft_seconds is not None
            assert answer.tokens_per_second is not None
            return answer.ttft_seconds, 1 / answer.tokens_per_second

        ask(0)
        begin, waits = time.perf_counter(), []
        for index, arrival in enumerate(arrivals):
            time.sleep(max(0.0, begin + arrival.seconds - time.perf_counter()))
            waits.append(pool.submit(ask, index))
        answers = [each.result() for each in waits]
    return statistics.median(first for first, _ in answers), statistics.median(per for _, per in answers)


def _serve(session: Session, arrivals: list[Arrival], token_prompts: list[list[int]]) -> tuple[float, float]:
    """Median time to the first token and per token after it, on a clock that only steps move."""
    decoder, clock, upcoming = session.decoder(), 0.0, 0
    firsts, lasts = [0.0] * len(arrivals), [0.0] * len(arrivals)
    moved: list[int] = []
    while upcoming < len(arrivals) or not decoder.is_idle:
        if decoder.is_idle:
            clock = max(clock, arrivals[upcoming].seconds)
        while upcoming < len(arrivals) and arrivals[upcoming].seconds <= clock:
            index, upcoming = upcoming, upcoming + 1
            params = greedy(arrivals[index].output_tokens)
            decoder.add(session.request(token_prompts[index], params, lambda _, index=index: moved.append(index)))
        begin = time.process_time()
        decoder.step()
        clock += time.process_time() - begin
        for index in moved:
            firsts[index] = firsts[index] or clock
            lasts[index] = clock
        moved.clear()
    waits = [first - arrival.seconds for first, arrival in zip(firsts, arrivals, strict=True)]
    intervals = [
        (last - first) / (arrival.output_tokens - 1)
        for first, last, arrival in zip(firsts, lasts, arrivals, strict=True)
    ]
    return statistics.median(waits), statistics.median(intervals)


def _system(name: str) -> System:
    target = target_shape(str(FIXTURES / name))
    draft = msgspec.structs.replace(draft_shape(str(FIXTURES / f"{name}-dflash")), runs_whole_block=True)
    return System(
        target=target, draft=draft, eagle3=eagle3_shape(target), gpu="cpu", gpu_memory_bytes=0, num_gpus=1,
        tensor_parallel=1, expert_parallel=1, drafter_ranks=1, runtime="embedded", kv_bytes=4,
    )  # fmt: skip


def _rates(values: dict[str, float]) -> Rates:
    fixed = dict.fromkeys(Rates.__struct_fields__, 1.0) | {
        "hbm_bandwidth": 1e11, "bf16_flops": 1e11, "fp8_flops": 0.0, "fp4_flops": 0.0, "attention_seconds": 0.0,
        "small_kernel_seconds": 0.0, "routing_exponent": 0.0, "allreduce_seconds": 0.0,
    }  # fmt: skip
    return Rates(**(fixed | values))


def _load(way: Way, context: float) -> Load:
    return Load(batch=way[0], draft_tokens=way[1], context=context)


def _predict(system: System, rates: Rates, load: Load) -> float:
    return StepModel(system, rates).price("dflash", load).seconds


def _fit(system: System, measured: dict[Load, float]) -> Rates:
    """The constants with the least squared relative error: Gauss-Newton on logarithms, damped."""
    names = list(START)
    seconds = np.array(list(measured.values()))

    def errors(logs: Sequence[float]) -> np.ndarray:
        rates = _rates(dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.array([_predict(system, rates, load) for load in measured]) / seconds - 1

    logs, damping = np.log(list(START.values())), 1e-2
    for _ in range(200):
        now = errors(logs)
        slopes = np.stack([errors(logs + 1e-4 * step) - now for step in np.eye(len(names))], axis=1) / 1e-4
        change = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(names)), -slopes.T @ now)
        change = np.clip(change, -1, 1)
        if np.square(errors(logs + change)).sum() < np.square(now).sum():
            logs, damping = logs + change, damping / 3
        else:
            damping *= 4
    return _rates(dict(zip(names, np.exp(logs).tolist(), strict=True)))


if __name__ == "__main__":
    main()
