# SPDX-License-Identifier: Apache-2.0
"""Compares steps of the embedded runtime on this CPU with the cost model's predictions.

Every batch size decodes with every draft length. A quarter of the combinations fits eight constants of the model for
this CPU (a kernel's floor, arithmetic, experts, host work), the same model then predicts the others. Two further
constants are fitted afterwards to the time that prompts add to steps, which is then predicted for other batches and
lengths. Steps are counted in CPU seconds of one thread, so that other work on the machine disturbs less. Prints tables,
asserts nothing.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import click
import msgspec
import numpy as np
import torch
from transformers.utils import logging

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.api.runtime_options import RuntimeOptions  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.deploy.gpus import GpuFacts  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.observe.estimate.constants import Rates  # noqa: E402
from dflash_trt.observe.estimate.inputs import eagle3_shape, target_shape  # noqa: E402
from dflash_trt.observe.estimate.shapes import System  # noqa: E402
from dflash_trt.observe.estimate.step import StepModel  # noqa: E402
from dflash_trt.observe.estimate.step_cost import StepLoad  # noqa: E402
from dflash_trt.runtime.load import open_session  # noqa: E402
from dflash_trt.runtime.policy.draft_length import FixedLength  # noqa: E402
from dflash_trt.runtime.session import Session  # noqa: E402
from tests.decoding import greedy  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.fixtures_data import PAIRS, prompts  # noqa: E402
from tests.paths import FIXTURES  # noqa: E402
from tools.estimate_tables import draft_shape  # noqa: E402

Case = TypeVar("Case")
Way = tuple[int, int]
"""Batch and draft length."""
BATCHES, MAX_PROMPT = (1, 2, 4, 8, 16, 32), 64
PROMPT_SLOTS = 16
CALIBRATION_BATCHES, CALIBRATION_LENGTHS = (1, 8, 32), (0, 1, 4, 7)
Prompts = tuple[int, int, int]
"""Requests that decode whole blocks, and length and number of the prompts that join them in one step."""
PROMPT_CALIBRATION = ((0, 16, 1), (0, 64, 1), (8, 16, 1), (8, 64, 1), (8, 64, 3))
PROMPT_CHECKS = ((0, 32, 1), (0, 48, 2), (2, 32, 1), (2, 64, 1), (4, 48, 2), (12, 32, 2), (12, 64, 1))
# Rates that the CPU's caches and single thread make irrelevant are out of the way; the others start here.
START = {
    "gemm_seconds": 2e-5, "compute_efficiency": 0.1, "moe_kernel_seconds": 1e-4, "moe_bandwidth_efficiency": 0.01,
    "host_plain_seconds": 5e-4, "host_speculative_seconds": 1e-3, "host_request_seconds": 1e-5,
    "host_speculative_request_seconds": 5e-5,
}  # fmt: skip
PROMPT_START = {"prompt_factor": 1.0, "host_prompt_seconds": 3e-4}


@click.command()
@click.option("--tokens", default=32, show_default=True, help="New tokens a request.")
@click.option("--rounds", default=4, show_default=True, help="Rounds of every batch and draft length.")
def main(tokens: int, rounds: int) -> None:
    """Measure, fit, predict."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    click.echo(f"{cpu_model()}, one thread, torch {torch.__version__}; {tokens} tokens a request, {rounds} rounds\n")
    for name in PAIRS:
        with tempfile.TemporaryDirectory() as directory:
            engine = Path(directory) / "engine"
            build(FIXTURES / f"{name}-dflash", engine, FIXTURES / name)
            measured, context = _measure(engine, name, tokens, rounds)
            fitted = _report(name, measured, context)
            _report_prompts(name, fitted, _prompt_steps(engine, name, tokens, rounds), context)


def _measure(engine: Path, name: str, tokens: int, rounds: int) -> tuple[dict[Way, float], float]:
    """CPU seconds of a step by batch and draft length, and the mean context.

    Every way has its turn in each round, and the median of its steps counts, as it does under load.
    """
    sessions = {
        batch: open_session(engine, str(FIXTURES / name), RuntimeOptions(max_batch_size=batch)) for batch in BATCHES
    }
    known = [prompt[:MAX_PROMPT] for prompt in prompts(sessions[1])]
    steps: dict[Way, list[float]] = {}
    for _ in range(rounds):
        for batch, session in sessions.items():
            for length in range(session.manifest.draft.num_draft_tokens + 1):
                chosen = [known[index % len(known)] for index in range(batch)]
                steps.setdefault((batch, length), []).extend(_steps(session, chosen, length, tokens))
    context = statistics.mean(map(len, known)) + tokens / 2
    return {way: statistics.median(values) for way, values in steps.items()}, context


def _steps(session: Session, chosen: list[list[int]], length: int, tokens: int) -> list[float]:
    """Seconds of every step in which all of `chosen` decode with `length` drafts."""
    decoder = session.decoder(FixedLength(length)) if length else session.plain_decoder()
    for prompt in chosen:
        decoder.add(session.request(prompt, greedy(tokens)))
    seconds = []
    while not decoder.is_idle:
        running = decoder.running.values()
        is_full = len(running) == len(chosen) and all(
            r.is_prefilled and r.params.max_tokens - len(r.answer) > length for r in running
        )
        begin = time.process_time()
        decoder.step()
        if is_full:
            seconds.append(time.process_time() - begin)
    return seconds


def _prompt_steps(engine: Path, name: str, tokens: int, rounds: int) -> dict[Prompts, float]:
    """CPU seconds that prompts add, to the step that reads them and to the next, which injects what they left."""
    session = open_session(engine, str(FIXTURES / name), RuntimeOptions(max_batch_size=PROMPT_SLOTS))
    text = [token for prompt in prompts(session) for token in prompt]
    steps: dict[Prompts, list[list[float]]] = {}
    for turn in range(4 * rounds):
        for case in (*PROMPT_CALIBRATION, *PROMPT_CHECKS):
            begin = 37 * turn % len(text)
            seconds = _joined(session, text[begin:] + text[:begin], case, tokens)
            steps.setdefault(case, []).append(seconds)
    quartiles = {case: np.quantile(np.array(rows), 0.25, axis=0) for case, rows in steps.items()}
    return {
        case: float(read + injected - before - after) for case, (before, read, injected, after) in quartiles.items()
    }


def _joined(session: Session, text: list[int], case: Prompts, tokens: int) -> list[float]:
    """CPU seconds of four steps: before prompts join, the one that reads them, the one that injects them, after."""
    batch, size, count = case
    decoder = session.decoder()
    for index in range(batch):
        decoder.add(session.request(text[size * index :][:size], greedy(2 * tokens)))
    for _ in range(2 if batch else 0):  # all prompts, up to a chunk of 256 tokens a step, and a first block
        decoder.step()
    while any(not request.is_prefilled for request in decoder.running.values()):
        decoder.step()
    seconds = []
    for turn in range(4):
        if turn == 1:
            for index in range(batch, batch + count):
                decoder.add(session.request(text[size * index :][:size], greedy(2 * tokens)))
        begin = time.process_time()
        decoder.step()
        seconds.append(time.process_time() - begin)
    for request in [*decoder.running.values()]:
        decoder.cancel(request)
    return seconds


def _report(name: str, measured: dict[Way, float], context: float) -> Rates:
    system = _system(name)
    calibration = [way for way in measured if way[0] in CALIBRATION_BATCHES and way[1] in CALIBRATION_LENGTHS]
    fitted = _fit(
        _rates({}),
        START,
        lambda rates, way: _predict(system, rates, way, context),
        {w: measured[w] for w in calibration},
    )
    predicted = {way: _predict(system, fitted, way, context) for way in measured}
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
    errors = [predicted[way] / measured[way] - 1 for way in measured if way not in calibration]
    click.echo(f"decoding, {_summary(errors)}\nconstants: {_constants(fitted, START)}\n")
    return fitted


def _report_prompts(name: str, fitted: Rates, measured: dict[Prompts, float], context: float) -> None:
    """Fits what is left for prompts, and says how far the others' prediction is."""
    model = _system(name)
    fitted = _fit(
        fitted, PROMPT_START, lambda rates, case: _added(model, rates, case, context),
        {case: measured[case] for case in PROMPT_CALIBRATION}, statistics.mean(measured.values()),
    )  # fmt: skip
    rows, errors = [], []
    for case, theirs in measured.items():
        ours = _added(model, fitted, case, context)
        mark = "*" if case in PROMPT_CALIBRATION else ""
        rows.append((f"{case[2]} of {case[1]}", str(case[0]), f"{theirs * 1e3:.1f} {ours / theirs - 1:+.0%}{mark}"))
        if not mark:
            errors.append(ours / theirs - 1)
    print_table(
        f"{name}: ms that prompts add, and the model's error; * calibration", ("prompts", "decoding", "added"), rows
    )
    click.echo(f"prompts, {_summary(errors)}\nconstants: {_constants(fitted, PROMPT_START)}\n")


def _summary(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    within = sum(size <= 0.15 for size in sizes)
    return (
        f"predicted, not fitted: median error {statistics.median(sizes):.1%}, largest {max(sizes):.1%},"
        f" within 15 %: {within} of {len(sizes)}"
    )


def _constants(rates: Rates, names: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {getattr(rates, key):.3g}" for key in names)


CPU = GpuFacts(memory=1, sm=7.5).spec("cpu")


def _system(name: str) -> System:
    target = target_shape(str(FIXTURES / name))
    draft = msgspec.structs.replace(draft_shape(str(FIXTURES / f"{name}-dflash")), runs_whole_block=True)
    return System(
        target=target, draft=draft, eagle3=eagle3_shape(target), gpu=CPU, gpu_memory_bytes=0, num_gpus=1,
        tensor_parallel=1, expert_parallel=1, drafter_ranks=1, runtime="embedded", kv_bytes=4,
    )  # fmt: skip


def _rates(values: dict[str, float]) -> Rates:
    fixed = dict.fromkeys(Rates.__struct_fields__, 1.0) | {
        "memory_bandwidth": 1e11, "bf16_flops": 1e11, "fp8_flops": 0.0, "fp4_flops": 0.0, "attention_seconds": 0.0,
        "small_kernel_seconds": 0.0, "routing_exponent": 0.0, "allreduce_seconds": 0.0, "host_prompt_seconds": 0.0,
    }  # fmt: skip
    return Rates(**(fixed | values))


def _predict(system: System, rates: Rates, way: Way, context: float) -> float:
    load = StepLoad(batch=way[0], num_draft_tokens=way[1], context=context)
    return StepModel(system, rates).price("dflash", load).seconds


def _added(system: System, rates: Rates, case: Prompts, context: float) -> float:
    """Time that prompts add to a step; if no request decodes, the whole step."""
    assert system.draft is not None
    batch, size, count = case
    model, length = StepModel(system, rates), system.draft.max_draft_tokens if batch else 0
    without = StepLoad(batch=batch, num_draft_tokens=length, context=context)
    joined = msgspec.structs.replace(without, prompt_tokens=size * count, prompts=count)
    base = model.price("dflash", without).seconds if batch else 0.0
    return model.price("dflash", joined).seconds - base


def _fit(
    base: Rates,
    start: Mapping[str, float],
    predict: Callable[[Rates, Case], float],
    measured: Mapping[Case, float],
    scale: float | None = None,
) -> Rates:
    """`base` with the constants named in `start` that give the least squared error, relative to `scale` seconds.

    Without a scale, to what was measured. Gauss-Newton on the constants' logarithms, damped.
    """
    names, seconds = list(start), np.array(list(measured.values()))

    def rates(logs: np.ndarray) -> Rates:
        return msgspec.structs.replace(base, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def errors(logs: np.ndarray) -> np.ndarray:
        moved = rates(logs)
        return (np.array([predict(moved, case) for case in measured]) - seconds) / (scale or seconds)

    logs, damping = np.log(list(start.values())), 1e-2
    for _ in range(200):
        now = errors(logs)
        slopes = np.stack([errors(logs + 1e-4 * step) - now for step in np.eye(len(names))], axis=1) / 1e-4
        change = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(names)), -slopes.T @ now)
        change = np.clip(change, -1, 1)
        if np.square(errors(logs + change)).sum() < np.square(now).sum():
            logs, damping = logs + change, damping / 3
        else:
            damping *= 4
    return rates(logs)


if __name__ == "__main__":
    main()
