# SPDX-License-Identifier: Apache-2.0
"""Acceptance of each engine of a server, by the label of its counters."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.counter_meters import VLLM
from dflash_trt.observe.endpoints.metrics_page import MetricsPage

LABEL = "engine"
"""vLLM's label of data-parallel engines (vllm/v1/metrics/loggers.py)."""


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


def engine_page(client: Client) -> MetricsPage | None:
    """The counters of the engines; None where the server has no such page."""
    try:
        return MetricsPage.parse(client.get("/metrics"), f"{client.url}/metrics")
    except EndpointError:
        return None


def engine_acceptances(before: MetricsPage | None, after: MetricsPage | None) -> Iterator[EngineAcceptance]:
    """By label, growth between two pages; none where a counter went backwards or only one engine is named."""
    if before is None or after is None:
        return
    names = (f"{VLLM}_drafts_total", f"{VLLM}_accepted_tokens_total", "vllm:generation_tokens_total")
    ends, begins = ([page.by_label(name, LABEL) for name in names] for page in (after, before))
    engines = sorted({engine for end in ends for engine in end}, key=lambda engine: (len(engine), engine))
    if len(engines) < 2:
        return
    for engine in engines:
        growth = [end.get(engine, 0) - begin.get(engine, 0) for end, begin in zip(ends, begins, strict=True)]
        if min(growth) < 0:
            raise EndpointError(
                f"{after.where}: the counters of engine {engine} went backwards",
                hint="the server was restarted in between: measure again",
            )
        yield EngineAcceptance(
            engine=engine, drafting_passes=growth[0], accepted=growth[1], output_tokens=growth[2]
        )  # fmt: skip
