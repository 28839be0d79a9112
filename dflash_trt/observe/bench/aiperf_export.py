# SPDX-License-Identifier: Apache-2.0
"""What AIPerf exports: profile_export_aiperf.json, a summary, and profile_export.jsonl, a record of each request.

Names and units as AIPerf 0.13.0 writes them (schema 1.4): times in ms, moments in ns. It keeps no finish_reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dflash_trt.errors import EndpointError, cut
from dflash_trt.files.json_file import read_json, read_json_lines
from dflash_trt.observe.bench.records import BenchPoint, Distribution, RecordedAcceptance, RequestCounts, RequestRow
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting

SUMMARY = "profile_export_aiperf.json"
RECORDS = "profile_export.jsonl"
WHAT = "an export of AIPerf 0.13"
TIMED_OUT = "timed out"


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
    request_start_ns: int
    request_end_ns: int
    benchmark_phase: str
    was_cancelled: bool = False


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str | None = None
    code: int | None = None


class _Speculation(msgspec.Struct, frozen=True):
    num_accepted_draft_tokens: Annotated[int, msgspec.Meta(ge=0)]
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=0)]
    num_spec_steps: Annotated[int, msgspec.Meta(ge=0)]


class _Record(msgspec.Struct, frozen=True):
    metadata: _Metadata
    metrics: _Metrics
    error: _Error | None = None
    spec_decode_acceptance: _Speculation | None = None

    @property
    def failure(self) -> str | None:
        """Why the request has no answer."""
        if self.error is None:
            return "cancelled" if self.metadata.was_cancelled else None
        if self.error.type == "TimeoutError":
            return TIMED_OUT
        return cut(f"{self.error.code or self.error.type or 'error'}: {self.error.message}")


class _Summary(msgspec.Struct, frozen=True):
    aiperf_version: str
    was_cancelled: bool
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Export:
    rows: tuple[RequestRow, ...]
    """The completed requests."""
    errors: Mapping[str, int]
    """What the others got, and how often."""
    seconds: float
    """From the first request to the last answer."""


def read_export(folder: Path, categories: Mapping[str, str | None], max_tokens: int) -> Export:
    """Reads both files; `categories` are the conversations'; an answer of `max_tokens` tokens counts as cut.

    Raises EndpointError for exports that AIPerf 0.13 would not write, and for a run that was cut short.
    """
    summary = read_json(folder / SUMMARY, _Summary, EndpointError, what=WHAT)
    if summary.was_cancelled or not summary.is_complete:
        raise EndpointError(f"{folder / SUMMARY}: the run was cut short")
    records = list(_records(folder))
    if not records:
        raise EndpointError(f"{folder / RECORDS}: no request was recorded")
    begin = min(record.metadata.request_start_ns for _, record in records)
    end = max(record.metadata.request_end_ns for _, record in records)
    return Export(
        rows=tuple(_row(where, r, categories, max_tokens) for where, r in records if r.failure is None),
        errors=Counter(record.failure for _, record in records if record.failure is not None),
        seconds=(end - begin) / 1e9,
    )


def first_error(folder: Path) -> str | None:
    """What the first failed request got, where AIPerf has recorded it."""
    with suppress(EndpointError):
        return next((record.failure for _, record in _records(folder) if record.failure is not None), None)
    return None


def _records(folder: Path) -> Iterator[tuple[str, _Record]]:
    for where, record in read_json_lines(folder / RECORDS, _Record, EndpointError, what=WHAT):
        if record.metadata.benchmark_phase == "profiling":
            yield where, record


def _row(where: str, record: _Record, categories: Mapping[str, str | None], max_tokens: int) -> RequestRow:
    metrics, speculation = record.metrics, record.spec_decode_acceptance
    if metrics.usage_prompt_tokens is None or metrics.usage_completion_tokens is None:
        raise EndpointError(
            f"{where}: the server did not count tokens", hint="the server must answer stream_options.include_usage"
        )
    if metrics.request_latency is None:
        raise EndpointError(f"{where}: request_latency is missing")
    output_tokens = int(metrics.usage_completion_tokens.value)
    return RequestRow(
        input_tokens=int(metrics.usage_prompt_tokens.value),
        output_tokens=output_tokens,
        ttft_seconds=None if metrics.time_to_first_token is None else metrics.time_to_first_token.value / 1e3,
        seconds=metrics.request_latency.value / 1e3,
        finish="length" if output_tokens >= max_tokens else None,
        category=categories.get(record.metadata.conversation_id),
        acceptance=None
        if speculation is None
        else drafting(speculation.num_spec_steps, speculation.num_accepted_draft_tokens, speculation.num_draft_tokens),
    )


def measured_point(
    export: Export, observed: ObservedAcceptance, *, method: str, category: str | None, concurrency: int, seed: int,
) -> BenchPoint:  # fmt: skip
    rows, lost = export.rows, sum(export.errors.values())
    decodings = [(row, row.seconds - row.ttft_seconds) for row in rows if row.ttft_seconds is not None]
    later = [(row.output_tokens - 1, seconds) for row, seconds in decodings if row.output_tokens > 1]
    output_tokens = sum(row.output_tokens for row in rows)
    is_hidden = observed.source in ("not published", "unreadable")
    timed_out = export.errors.get(TIMED_OUT, 0)
    return BenchPoint(
        method=method,
        category=category,
        concurrency=concurrency,
        seed=seed,
        requests=RequestCounts(
            sent=len(rows) + lost,
            completed=len(rows),
            failed=lost - timed_out,
            timed_out=timed_out,
            cut=sum(row.finish == "length" for row in rows),
            errors=dict(export.errors),
        ),
        seconds=export.seconds,
        input_tokens=sum(row.input_tokens for row in rows),
        output_tokens=output_tokens,
        output_tokens_per_second=output_tokens / export.seconds if export.seconds else 0.0,
        ttft_seconds=_distribution([row.ttft_seconds for row in rows if row.ttft_seconds is not None]),
        itl_seconds=_distribution([seconds / tokens for tokens, seconds in later]),
        request_seconds=_distribution([row.seconds for row in rows]),
        user_tokens_per_second=_distribution([tokens / seconds for tokens, seconds in later if seconds > 0]),
        rows=rows,
        acceptance=recorded(_of_requests(rows) or observed if is_hidden else observed),
    )


def recorded(observed: ObservedAcceptance) -> RecordedAcceptance:
    """`observed` as a run keeps it: all counts if published, else the average, else why neither is."""
    tau, counts = observed.tau_of_drafting_passes, observed.counts
    if observed.source == "not published" or observed.source == "unreadable":
        return RecordedAcceptance(source="not published", why=observed.how)
    if counts is not None and counts.proposed is not None:
        return RecordedAcceptance(source=observed.source, counts=counts, tau_of_drafting_passes=tau, how=observed.how)
    if tau is None:
        return RecordedAcceptance(source="not published", why=f"no verify pass: {observed.how}")
    return RecordedAcceptance(source="gauges", tau_of_drafting_passes=tau, how=observed.how)


def _of_requests(rows: Sequence[RequestRow]) -> ObservedAcceptance | None:
    """The sum over answers, if each has its own counts."""
    counts = [row.acceptance for row in rows if row.acceptance is not None]
    if not counts or len(counts) < len(rows):
        return None
    how = "metrics.speculative_decoding of each answer"
    return ObservedAcceptance(source="per request", how=how, counts=sum(counts, drafting(0, 0, 0)))


def _distribution(values: Sequence[float]) -> Distribution | None:
    import numpy as np

    if not values:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Distribution(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)
