# SPDX-License-Identifier: Apache-2.0
"""What AIPerf saw and what the server counted, as one point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dflash_trt.observe.bench.aiperf_export import Export, RequestRecord
from dflash_trt.observe.bench.records import BenchPoint, Distribution, RecordedAcceptance, RequestCounts, RequestRow
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting


def measured_point(
    export: Export,
    observed: ObservedAcceptance,
    *,
    method: str,
    category: str | None,
    concurrency: int,
    seed: int,
    max_tokens: int,
    categories: Mapping[str, str | None],
) -> BenchPoint:
    """`categories` are those of the conversations. An answer of `max_tokens` tokens was cut: AIPerf keeps no reason."""
    lost = [record for record in export.records if record.error is not None]
    rows = tuple(_row(record, max_tokens, categories) for record in export.records if record.error is None)
    decodings = [(row, row.seconds - row.ttft_seconds) for row in rows if row.ttft_seconds is not None]
    later = [(row.output_tokens - 1, seconds) for row, seconds in decodings if row.output_tokens > 1]
    output_tokens = sum(row.output_tokens for row in rows)
    is_hidden = observed.source in ("not published", "unreadable")
    return BenchPoint(
        method=method,
        category=category,
        concurrency=concurrency,
        seed=seed,
        requests=RequestCounts(
            sent=len(export.records),
            completed=len(rows),
            failed=sum(not record.is_timeout for record in lost),
            timed_out=sum(record.is_timeout for record in lost),
            cut=sum(row.finish == "length" for row in rows),
            errors=dict(Counter(record.error or "" for record in lost)),
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
        acceptance=recorded(_of_requests(export.records) or observed if is_hidden else observed),
    )


def recorded(observed: ObservedAcceptance) -> RecordedAcceptance:
    """`observed` as a run keeps it: counts where all are published, else the average, else why there is none."""
    tau, counts = observed.tau_of_drafting_passes, observed.counts
    if observed.source == "not published" or observed.source == "unreadable":
        return RecordedAcceptance(source="not published", why=observed.how)
    if counts is not None and counts.proposed is not None:
        return RecordedAcceptance(source=observed.source, counts=counts, tau_of_drafting_passes=tau, how=observed.how)
    if tau is None:
        return RecordedAcceptance(source="not published", why=f"no verify pass: {observed.how}")
    return RecordedAcceptance(source="gauges", tau_of_drafting_passes=tau, how=observed.how)


def _of_requests(records: Sequence[RequestRecord]) -> ObservedAcceptance | None:
    """The sum over answers, where each tells its own."""
    counts = [record.acceptance for record in records if record.error is None]
    if not counts or None in counts:
        return None
    total = sum((each for each in counts if each is not None), drafting(0, 0, 0))
    return ObservedAcceptance(source="per request", how="metrics.speculative_decoding of each answer", counts=total)


def _row(record: RequestRecord, max_tokens: int, categories: Mapping[str, str | None]) -> RequestRow:
    return RequestRow(
        input_tokens=record.input_tokens,
        output_tokens=record.output_tokens,
        ttft_seconds=record.ttft_seconds,
        seconds=record.seconds,
        finish="length" if record.output_tokens >= max_tokens else None,
        category=categories.get(record.conversation),
        acceptance=record.acceptance,
    )


def _distribution(values: Sequence[float]) -> Distribution | None:
    import numpy as np

    if not values:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Distribution(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)
