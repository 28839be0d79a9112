# SPDX-License-Identifier: Apache-2.0
"""A run in the files of NVIDIA's specdec_bench, so that results lie beside theirs.

NVIDIA/Model-Optimizer, examples/specdec_bench (read at a2fbac7): metrics/timing.py, metrics/acceptance_rate.py,
metrics/specbench.py and utils.py's dump_env name the keys. A folder per point, as its sweeps have. What a load from
outside cannot know is null or absent: texts, checkpoints, times of single passes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dflash_trt.observe.bench.records import BenchMethod, BenchPoint, BenchRun, RequestRow
from dflash_trt.observe.bench.workloads import LoadedRun
from dflash_trt.runtime.acceptance import Acceptance

ENGINES = {"tensorrt-llm": "TRTLLM", "vllm": "VLLM", "sglang": "SGLANG"}
QUANTILES = (0.25, 0.5, 0.75)


def write_specdec_files(directory: Path, runs: Sequence[LoadedRun]) -> None:
    """Writes `directory`/[RUN-]METHOD-[CATEGORY-]cN/ for each point with a completed request."""
    for one in runs:
        for point in one.points:
            if point.requests.completed:
                method = next(method for method in one.run.methods if method.name == point.method)
                prefix = f"{one.directory.name}-" if len(runs) > 1 else ""
                category = f"{point.category}-" if point.category else ""
                folder = directory / f"{prefix}{point.method}-{category}c{point.concurrency}"
                folder.mkdir(parents=True)
                for name, content in specdec_files(one.run, method, point):
                    (folder / name).write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


def specdec_files(run: BenchRun, method: BenchMethod, point: BenchPoint) -> Iterator[tuple[str, object]]:
    """Names and contents; theirs append to timing.json and acceptance_rate.json, so those hold lists."""
    yield "configuration.json", configuration(run, method, point)
    yield "timing.json", [timing(point, run.num_gpus)]
    found = acceptance_rate(point)
    if found is not None:
        yield "acceptance_rate.json", [found]
    if any(row.category is not None and row.acceptance and row.acceptance.drafting_passes for row in point.rows):
        assert found is not None
        yield "specbench_results.json", {**found, "Category_AL": _category_lengths(point.rows)}


def configuration(run: BenchRun, method: BenchMethod, point: BenchPoint) -> dict[str, object]:
    """As dump_env: options of run.py that we know, then versions and command."""
    settings = run.request
    return {
        "dataset": run.prompt_set.name, "dataset_path": run.prompt_set.source, "num_requests": point.requests.sent,
        "engine": ENGINES.get(method.runtime, method.runtime), "speculative_algorithm": method.name.upper(),
        "model_dir": method.model, "draft_model_dir": None, "temperature": settings.temperature,
        "output_length": settings.max_tokens, "draft_length": None, "tp_size": run.num_gpus, "ep_size": None,
        "concurrency": point.concurrency, "ignore_eos": settings.ignore_eos,
        "completions": settings.template == "completions", "serving_config": {"url": method.url},
        "engine_version": method.runtime_version, "gpu": run.server, "python_version": run.versions.get("python"),
        "argv": list(run.command), "specdec_bench_version": None, "modelopt_version": None, "container_image": None,
        "timestamp": run.created, "seed": point.seed, "written_by": f"dflash-trt {run.versions.get('dflash_trt')}",
    }  # fmt: skip


def timing(point: BenchPoint, num_gpus: int | None) -> dict[str, object]:
    """`Output TPS/gpu` is absent where the GPUs are not told; `Request Generation Step Time` always."""
    rows = [row for row in point.rows if row.ttft_seconds is not None]
    later = [(row.output_tokens - 1, row.seconds - (row.ttft_seconds or 0)) for row in rows if row.output_tokens > 1]
    found: dict[str, object] = {"Output TPS": point.output_tokens_per_second}
    if num_gpus is not None:
        found["Output TPS/gpu"] = point.output_tokens_per_second / num_gpus
    found["E2E Request Time"] = compute_statistics([row.seconds for row in point.rows])
    if rows:
        found["TTFT Time"] = compute_statistics([row.ttft_seconds or 0.0 for row in rows])
    rates = [tokens / seconds for tokens, seconds in later if seconds > 0]
    if rates:
        found["Request Generation Tokens Per Second"] = compute_statistics(rates)
    found["Number of Output Tokens"] = compute_statistics([row.output_tokens for row in point.rows])
    return found


def compute_statistics(values: Sequence[float]) -> dict[str, object]:
    """Theirs: texts of four decimals, the population's deviation, quartiles."""
    data = np.array(values, dtype=float)
    quantiles = zip(QUANTILES, np.percentile(data, [q * 100 for q in QUANTILES]), strict=True)
    return {
        "min": f"{data.min():.4f}", "max": f"{data.max():.4f}", "mean": f"{data.mean():.4f}",
        "std": f"{data.std():.4f}",
        "quantiles": {str(q): f"{value:.4f}" for q, value in quantiles},
    }  # fmt: skip


def acceptance_rate(point: BenchPoint) -> dict[str, object] | None:
    """Lengths count the bonus token, as tau of drafting passes does; None where the server publishes nothing.

    Average_AL is the mean over requests where each is known, and else that of the whole point.
    """
    found: dict[str, object] = {}
    lengths = _request_lengths(point.rows)
    if lengths:
        found["Request_AL"] = {str(index): {"0": length} for index, length in lengths.items()}
        found["Average_AL"] = statistics.fmean(lengths.values())
        found["Average_AL_is"] = "mean over requests"
    elif point.acceptance.tau_of_drafting_passes is not None:
        found["Average_AL"] = point.acceptance.tau_of_drafting_passes
        found["Average_AL_is"] = f"tau of drafting passes of the whole point, from {point.acceptance.source}"
    else:
        return None
    return found | _histogram(point.acceptance.counts)


def _request_lengths(rows: Sequence[RequestRow]) -> dict[int, float]:
    """By place in the point; those of requests with a verify pass."""
    taus = {index: row.acceptance.tau_of_drafting_passes for index, row in enumerate(rows) if row.acceptance}
    return {index: tau for index, tau in taus.items() if tau is not None}


def _category_lengths(rows: Sequence[RequestRow]) -> dict[str, float]:
    by_category: dict[str, list[float]] = {}
    for index, length in _request_lengths(rows).items():
        category = rows[index].category
        if category is not None:
            by_category.setdefault(category, []).append(length)
    return {category: statistics.fmean(by_category[category]) for category in sorted(by_category)}


def _histogram(found: Acceptance | None) -> dict[str, object]:
    """From counts by position: passes of each length, and the rates that follow; nothing where they are unknown."""
    if found is None or not found.drafting_passes or not found.accepted_by_position:
        return {}
    passes = found.drafting_passes
    at_least = [passes, *found.accepted_by_position, 0]
    lengths = {k + 1: at_least[k] - at_least[k + 1] for k in range(len(at_least) - 1)}
    histogram = {str(length): count for length, count in lengths.items() if count}
    conditional, joint, left, before = {}, {}, passes, 1.0
    for length, count in histogram.items():
        joint[length] = left / passes
        conditional[length] = joint[length] / before
        before, left = joint[length], left - count
    return {
        "Acceptance_Length_Histogram": histogram,
        "Conditional_Acceptance_Rate": conditional,
        "Joint_Acceptance_Rate": joint,
    }
