# SPDX-License-Identifier: Apache-2.0
"""A measured point of a bench run; its figures are AIPerf's, times in ms.

Acceptance is that of drafting passes throughout: servers count no other passes.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from dflash_trt.api.acceptance import Acceptance, Count
from dflash_trt.errors import ConfigError, shown
from dflash_trt.observe.bench.run_record import SCHEMA, Amount, BenchRecord, Positive, check_schema
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance

Latency = Literal["time_to_first_token", "inter_token_latency", "request_latency"]
MIN_STREAMED = 32
"""Output tokens of an answer that a server sends in several pieces, however many it drafts."""
TOKEN_SECONDS = 1e-4
"""Less than any server takes for a user's token: the fastest announced gives a user some 3,000 a second."""
LATENCIES: tuple[Latency, ...] = get_args(Latency)


class Distribution(BenchRecord, frozen=True, kw_only=True):
    """A metric over the completed requests of a point."""

    avg: Amount
    p50: Amount
    p90: Amount
    p99: Amount


class RequestRow(BenchRecord, frozen=True, kw_only=True):
    """A completed request."""

    input_tokens: Count
    output_tokens: Count
    ttft_seconds: Amount | None = None
    seconds: Amount
    """From sending it to its last token."""
    is_cut: bool = False
    """Whether max_tokens ended it."""
    category: str | None = None
    acceptance: Acceptance | None = None
    """Acceptance of this request, if the server reports it with the answer."""

    @property
    def is_in_one_piece(self) -> bool:
        """Whether all tokens came at once, faster than any server decodes."""
        return self.ttft_seconds is None or self.seconds - self.ttft_seconds < TOKEN_SECONDS * self.output_tokens


class BenchPoint(BenchRecord, frozen=True, kw_only=True):
    """One method at one concurrency, on one category or on all prompts."""

    schema: str = SCHEMA
    method: str
    category: str | None = None
    concurrency: Positive
    seed: int
    seconds: Amount
    """AIPerf's benchmark_duration."""
    output_tokens_per_second: Amount
    latencies: dict[Latency, Distribution] = msgspec.field(default_factory=dict)
    user_tokens_per_second: Distribution | None = None
    """(output tokens - 1) / (end - first token), per request; None where no request has two tokens."""
    good_requests: Count | None = None
    """Requests that kept the limits of the run's goodput."""
    errors: dict[str, Positive] = msgspec.field(default_factory=dict)
    """Errors of the requests that failed or timed out, and how often each came."""
    rows: tuple[RequestRow, ...]
    acceptance: ObservedAcceptance

    def __post_init__(self) -> None:
        check_schema(self.schema)
        if (counts := self.acceptance.counts) is not None and not _adds_up(counts):
            raise ConfigError(
                f"acceptance: the counts do not add up: {shown(msgspec.to_builtins(counts))}",
                hint="the server's counters contradict each other; measure the point again",
            )

    @property
    def name(self) -> str:
        category = "" if self.category is None else f", {self.category}"
        return f"{self.method}{category}, concurrency {self.concurrency}"

    @property
    def lost(self) -> int:
        """Requests that failed or timed out."""
        return sum(self.errors.values())

    @property
    def sent(self) -> int:
        return len(self.rows) + self.lost

    @property
    def output_tokens(self) -> int:
        """Output tokens of the completed requests, as the server counts them."""
        return sum(row.output_tokens for row in self.rows)

    @property
    def has_unstreamed_answers(self) -> bool:
        """Whether most answers of some length had all their tokens at once.

        AIPerf gives them an inter-token latency of 0 ms, which keeps every limit.
        """
        long = [row for row in self.rows if row.output_tokens >= MIN_STREAMED]
        return 2 * sum(row.is_in_one_piece for row in long) > len(long)

    @property
    def goodput(self) -> float:
        """Good requests a second."""
        return (self.good_requests or 0) / self.seconds if self.seconds else 0.0

    @property
    def user_rate(self) -> float | None:
        """Median speed of a user in tokens/s."""
        return None if self.user_tokens_per_second is None else self.user_tokens_per_second.p50


def _adds_up(counts: Acceptance) -> bool:
    by_position = counts.accepted_by_position
    at_least = (counts.drafting_passes, *by_position)
    return (
        (counts.proposed is None or counts.accepted <= counts.proposed)
        and sorted(at_least, reverse=True) == list(at_least)
        and (not by_position or sum(by_position) == counts.accepted)
    )
