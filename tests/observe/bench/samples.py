# SPDX-License-Identifier: Apache-2.0
"""Runs and points made from a few numbers, for tests of what reads them."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.observe.bench.point_record import BenchPoint, Distribution, RequestRow
from dflash_trt.observe.bench.run_directory import write_point, write_run
from dflash_trt.observe.bench.run_record import BenchMethod, BenchRun, LoadMachine, PromptSet, RequestSettings
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting

UNPUBLISHED = ObservedAcceptance(source="not published", how="a test")


def flat(value: float) -> Distribution:
    return Distribution(avg=value, p50=value, p90=value, p99=value)


def method(name: str, **changes: object) -> BenchMethod:
    return BenchMethod(
        **{"name": name, "url": "http://localhost:8000/v1", "runtime": "dflash-trt", "model": "m"} | changes
    )


def prompt_set(**changes: object) -> PromptSet:
    return PromptSet(**{"name": "ours", "source": "prompts.jsonl", "sha256": "0" * 64, "num_prompts": 2} | changes)


def run(*methods: str, concurrencies: tuple[int, ...] = (1,), **changes: object) -> BenchRun:
    values: dict[str, object] = {
        "created": "2026-11-22T04:00:00Z", "command": ("dflash-trt", "bench", "run"), "seed": 7,
        "versions": {"dflash_trt": "0.1.0", "aiperf": "0.13.0"},
        "client": LoadMachine(cpu="a CPU", cores=2, memory_gib=8.0), "prompt_set": prompt_set(),
        "request": RequestSettings(template="chat", temperature=0.0, max_tokens=64),
        "concurrencies": concurrencies, "methods": tuple(method(name) for name in methods),
    }  # fmt: skip
    return BenchRun(**values | changes)


def counters(passes: int, by_position: tuple[int, ...]) -> ObservedAcceptance:
    counts = drafting(passes, sum(by_position), passes * len(by_position), by_position)
    return ObservedAcceptance(source="counters", how="a test", counts=counts)


def point(
    method: str, concurrency: int, user_rate: float, rate: float, *, category: str | None = None,
    acceptance: ObservedAcceptance = UNPUBLISHED, rows: tuple[RequestRow, ...] | None = None, failed: int = 0,
    good: int | None = None,
) -> BenchPoint:  # fmt: skip
    """Requests of 11 tokens each, the first after one second, at `user_rate` and `rate` tokens a second in all."""
    if rows is None:
        row = RequestRow(input_tokens=5, output_tokens=11, ttft_seconds=1.0, seconds=1 + 10 / user_rate)
        rows = (row,) * concurrency
    output = sum(row.output_tokens for row in rows)
    rate = rate if output else 0.0
    return BenchPoint(
        method=method, category=category, concurrency=concurrency, seed=7,
        seconds=output / rate if output else 1.0, output_tokens_per_second=rate,
        user_tokens_per_second=flat(user_rate) if output else None, good_requests=good,
        errors={"HTTP 500": failed} if failed else {}, rows=rows, acceptance=acceptance,
    )  # fmt: skip


def run_of(directory: Path, *points: BenchPoint, **changes: object) -> Path:
    """The directory of a run with these points, of whose methods and concurrencies it is."""
    names = list(dict.fromkeys(each.method for each in points))
    concurrencies = tuple(sorted({each.concurrency for each in points}))
    write_run(directory, run(*names, **{"concurrencies": concurrencies} | changes))
    for each in points:
        write_point(directory, each)
    return directory
