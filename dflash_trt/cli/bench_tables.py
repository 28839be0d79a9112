# SPDX-License-Identifier: Apache-2.0
"""What `bench run` prints: its plan, or the points that are measured."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt.bench.records import Distribution, Point
from dflash_trt.bench.run_directory import read_points, read_run
from dflash_trt.cli.bench_methods import Plan
from dflash_trt.cli.output import print_json, print_table

COLUMNS = (
    "method", "category", "at once", "answers", "failed", "timed out", "cut", "tokens/s", "tokens/s a user", "TTFT",
    "tau",
)  # fmt: skip


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """What would be measured."""
    run = plan.run
    if as_json:
        print_json("bench-plan", {"run": msgspec.to_builtins(run)})
        return
    for method in run.methods:
        rows = [(key, _text(value)) for key, value in msgspec.to_builtins(method).items() if value not in (None, {})]
        print_table(method.name, ("method", "value"), rows)
    request = [(f"request {key}", _text(value)) for key, value in msgspec.to_builtins(run.request).items()]
    rows = [
        ("prompts", f"{run.prompt_set.num_prompts} of {run.prompt_set.name}"),
        ("categories", ", ".join(run.prompt_set.categories) or "-"),
        ("concurrency", ", ".join(map(str, run.concurrencies))),
        ("points", str(len(run.methods) * max(1, len(run.prompt_set.categories)) * len(run.concurrencies))),
        *request,
        *(("warning", warning) for warning in run.warnings),
    ]
    print_table("Plan", ("setting", "value"), rows)


def print_points(output: Path, *, as_json: bool) -> None:
    """All points of a run."""
    run = read_run(output)
    points = read_points(output, run)
    if as_json:
        short = [
            {k: v for k, v in msgspec.to_builtins(point).items() if k not in ("rows", "schema")} for point in points
        ]
        print_json("bench-run", {"run": msgspec.to_builtins(run), "points": short})
    else:
        print_table(f"{run.prompt_set.name}, {_settings(run.request)}", COLUMNS, [_row(point) for point in points])


def _row(point: Point) -> tuple[str, ...]:
    requests, acceptance = point.requests, point.acceptance
    tau = "-" if acceptance.tau is None else f"{acceptance.tau:.2f}"
    return (
        point.method, point.category or "all", str(point.concurrency), f"{requests.completed} of {requests.sent}",
        str(requests.failed), str(requests.timed_out), str(requests.cut), f"{point.output_tokens_per_second:.1f}",
        _median(point.user_tokens_per_second, 1, ""), _median(point.ttft_seconds, 1e3, " ms"), tau,
    )  # fmt: skip


def _median(found: Distribution | None, scale: float, unit: str) -> str:
    return "-" if found is None else f"{found.p50 * scale:.1f}{unit}"


def _settings(request: msgspec.Struct) -> str:
    fields = msgspec.to_builtins(request)
    return ", ".join(f"{key} {_text(value)}" for key, value in fields.items() if value is not None)


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
