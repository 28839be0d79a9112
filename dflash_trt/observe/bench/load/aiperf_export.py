# SPDX-License-Identifier: Apache-2.0
"""A measured point from AIPerf 0.13.0's exports: its own summary, profile_export_aiperf.json, and every request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from dflash_trt.api.acceptance import Count
from dflash_trt.errors import EndpointError, cut
from dflash_trt.files.json_file import read_json, read_json_lines
from dflash_trt.observe.bench.point_record import LATENCIES, BenchPoint, Distribution, RequestRow
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting

RECORDS = "profile_export.jsonl"
WHAT = "an export of AIPerf 0.13"
SUMMARY = "profile_export_aiperf.json"


class _Milliseconds(msgspec.Struct, frozen=True):
    value: float
    unit: Literal["ms"]


class _Tokens(msgspec.Struct, frozen=True):
    value: float
    unit: Literal["tokens"]


class _Metrics(msgspec.Struct, frozen=True):
    """Metrics that are read; a request that failed has none."""

    request_latency: _Milliseconds | None = None
    time_to_first_token: _Milliseconds | None = None
    usage_prompt_tokens: _Tokens | None = None
    usage_completion_tokens: _Tokens | None = None


class _Metadata(msgspec.Struct, frozen=True):
    conversation_id: str
    benchmark_phase: str
    was_cancelled: bool = False


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str | None = None
    code: int | None = None


class _Speculation(msgspec.Struct, frozen=True):
    num_accepted_draft_tokens: Count
    num_draft_tokens: Count
    num_spec_steps: Count


class _Record(msgspec.Struct, frozen=True):
    metadata: _Metadata
    metrics: _Metrics
    error: _Error | None = None
    spec_decode_acceptance: _Speculation | None = None


def read_records(folder: Path, categories: Mapping[str, str | None], max_tokens: int) -> Iterator[RequestRow | str]:
    """Each request, or the error of one that failed; `categories` are the conversations'.

    The file, schema 1.4, keeps no finish_reason: an answer of max_tokens tokens counts as cut.
    """
    for where, record in read_json_lines(folder / RECORDS, _Record, EndpointError, what=WHAT):
        if record.metadata.benchmark_phase == "profiling":
            category = categories.get(record.metadata.conversation_id)
            yield _failure(record) or _row(where, record, category, max_tokens)


def first_error(folder: Path) -> str | None:
    """Error of the first failed request, if AIPerf has recorded one."""
    with suppress(EndpointError):
        return next((found for found in read_records(folder, {}, 0) if isinstance(found, str)), None)
    return None


def _failure(record: _Record) -> str | None:
    if record.error is None:
        return "cancelled" if record.metadata.was_cancelled else None
    if record.error.type == "TimeoutError":
        return "timed out"
    return cut(f"{record.error.code or record.error.type or 'error'}: {record.error.message}")


def _row(where: str, record: _Record, category: str | None, max_tokens: int) -> RequestRow:
    metrics, drafts = record.metrics, record.spec_decode_acceptance
    inputs, outputs, first = metrics.usage_prompt_tokens, metrics.usage_completion_tokens, metrics.time_to_first_token
    if inputs is None or outputs is None:
        raise EndpointError(
            f"{where}: the server did not count tokens", hint="the server must answer stream_options.include_usage"
        )
    if metrics.request_latency is None:
        raise EndpointError(f"{where}: request_latency is missing")
    acceptance = None
    if drafts is not None:
        acceptance = drafting(drafts.num_spec_steps, drafts.num_accepted_draft_tokens, drafts.num_draft_tokens)
    return RequestRow(
        input_tokens=int(inputs.value),
        output_tokens=int(outputs.value),
        ttft_seconds=None if first is None else first.value / 1e3,
        seconds=metrics.request_latency.value / 1e3,
        is_cut=outputs.value >= max_tokens,
        category=category,
        acceptance=acceptance,
    )


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
