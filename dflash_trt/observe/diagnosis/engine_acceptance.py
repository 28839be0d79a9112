# SPDX-License-Identifier: Apache-2.0
"""Acceptance of each engine of a server, by the label of vLLM's counters (vllm/v1/metrics/loggers.py)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.counter_growth import acceptance_of, by_engine, grown
from dflash_trt.observe.endpoints.counter_names import VLLM
from dflash_trt.observe.endpoints.metrics_page import MetricsPage, read_page


class EngineAcceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Growth of one engine's counters."""

    engine: str
    drafting_passes: int
    accepted: int
    output_tokens: int

    @property
    def tau(self) -> float:
        """Tau of drafting passes; 1 without a pass."""
        return 1 + self.accepted / self.drafting_passes if self.drafting_passes else 1.0


def counters_page(client: Client) -> MetricsPage | None:
    """The server's counters; None where it has no such page."""
    try:
        return read_page(client, VLLM.path)
    except EndpointError:
        return None


def engine_acceptances(before: MetricsPage | None, after: MetricsPage | None) -> Iterator[EngineAcceptance]:
    """By label, growth between two pages; nothing where only one engine is named.

    Raises EndpointError where a counter went backwards.
    """
    if before is None or after is None:
        return
    engines = by_engine(grown(before, after, VLLM.drafts), VLLM)
    for engine, growth in engines.items() if len(engines) > 1 else ():
        counts = acceptance_of(growth, VLLM)
        yield EngineAcceptance(
            engine=engine, drafting_passes=counts.drafting_passes, accepted=counts.accepted,
            output_tokens=growth.count(VLLM.output_tokens),
        )  # fmt: skip


def prefix_hits_between(before: MetricsPage | None, after: MetricsPage | None) -> int | None:
    """Tokens that the prefix cache served between two pages; None where none was looked up, or no page tells."""
    if before is None or after is None:
        return None
    for queries, hits in zip(VLLM.prefix_queries, VLLM.prefix_hits, strict=True):
        growth = grown(before, after, (queries, hits))
        if growth.has(queries):
            return growth.count(hits) if growth.count(queries) else None
    return None
