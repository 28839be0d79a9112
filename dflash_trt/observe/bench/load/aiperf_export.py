# SPDX-License-Identifier: Apache-2.0
"""A measured point from AIPerf 0.13.0's exports: its own summary, profile_export_aiperf.json, and every request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dflash_trt.errors import EndpointError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.bench.load.aiperf_records import RECORDS, WHAT, read_records
from dflash_trt.observe.bench.point_record import LATENCIES, BenchPoint, Distribution, RequestRow
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting

SUMMARY = "profile_export_aiperf.json"


class _Average(msgspec.Struct, frozen=True):
    avg: float


class _Percentiles(msgspec.Struct, frozen=True):
    unit: Literal["ms", "tokens/sec/user"]
    avg: float
    p50: float
    p90: float
    p99: float


class _Summary(msgspec.Struct, frozen=True):
    aiperf_version: str
    was_cancelled: bool
    is_complete: bool
    benchmark_duration: _Average
    output_token_throughput: _Average | None = None
    good_request_count: _Average | None = None
    output_token_throughput_per_user: _Percentiles | None = None
    time_to_first_token: _Percentiles | None = None
    inter_token_latency: _Percentiles | None = None
    request_latency: _Percentiles | None = None


def read_export(
    folder: Path, observed: ObservedAcceptance, *, method: str, category: str | None, concurrency: int, seed: int,
    max_tokens: int, categories: Mapping[str, str | None],
) -> BenchPoint:  # fmt: skip
    """The point that AIPerf measured; `categories` are the conversations', `observed` is the server's acceptance.

    Raises EndpointError for exports that AIPerf 0.13 would not write, and for a run that was cut short.
    """
    summary = read_json(folder / SUMMARY, _Summary, EndpointError, what=WHAT)
    if summary.was_cancelled or not summary.is_complete:
        raise EndpointError(f"{folder / SUMMARY}: the run was cut short")
    records = list(read_records(folder, categories, max_tokens))
    if not records:
        raise EndpointError(f"{folder / RECORDS}: no request was recorded")
    rows = tuple(record for record in records if isinstance(record, RequestRow))
    latencies = {name: _distribution(getattr(summary, name)) for name in LATENCIES}
    throughput, good = summary.output_token_throughput, summary.good_request_count
    return BenchPoint(
        method=method, category=category, concurrency=concurrency, seed=seed,
        seconds=summary.benchmark_duration.avg, output_tokens_per_second=0.0 if throughput is None else throughput.avg,
        latencies={name: found for name, found in latencies.items() if found is not None},
        user_tokens_per_second=_distribution(summary.output_token_throughput_per_user),
        good_requests=None if good is None else round(good.avg),
        errors=Counter(record for record in records if isinstance(record, str)), rows=rows,
        acceptance=observed if observed.is_published else _of_requests(rows) or observed,
    )  # fmt: skip


def _distribution(found: _Percentiles | None) -> Distribution | None:
    return None if found is None else Distribution(avg=found.avg, p50=found.p50, p90=found.p90, p99=found.p99)


def _of_requests(rows: Sequence[RequestRow]) -> ObservedAcceptance | None:
    """The sum over answers, if each has its own counts."""
    counts = [row.acceptance for row in rows if row.acceptance is not None]
    if not counts or len(counts) < len(rows):
        return None
    how = "metrics.speculative_decoding of each answer"
    return ObservedAcceptance(source="per request", how=how, counts=sum(counts, drafting(0, 0, 0)))
