# SPDX-License-Identifier: Apache-2.0
"""What AIPerf saw and what the server counted, as one point."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.observe.bench.aiperf_export import TIMED_OUT, Export
from dflash_trt.observe.bench.records import BenchPoint, Distribution, RecordedAcceptance, RequestCounts, RequestRow
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting


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
    """`observed` as a run keeps it: counts where all are published, else the average, else why there is none."""
    tau, counts = observed.tau_of_drafting_passes, observed.counts
    if observed.source == "not published" or observed.source == "unreadable":
        return RecordedAcceptance(source="not published", why=observed.how)
    if counts is not None and counts.proposed is not None:
        return RecordedAcceptance(source=observed.source, counts=counts, tau_of_drafting_passes=tau, how=observed.how)
    if tau is None:
        return RecordedAcceptance(source="not published", why=f"no verify pass: {observed.how}")
    return RecordedAcceptance(source="gauges", tau_of_drafting_passes=tau, how=observed.how)


def _of_requests(rows: Sequence[RequestRow]) -> ObservedAcceptance | None:
    """The sum over answers, where each tells its own."""
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
