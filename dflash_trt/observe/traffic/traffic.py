# SPDX-License-Identifier: Apache-2.0
"""A window's figures under one set of names: acceptance by engine and position, caches, queue, speed per user."""

from __future__ import annotations

import re

import msgspec

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.errors import EndpointError, shown
from dflash_trt.observe.endpoints.counter_growth import EngineAcceptance, acceptance_of, by_engine
from dflash_trt.observe.endpoints.counter_names import COUNTER_NAMES, MODEL_LABEL
from dflash_trt.observe.endpoints.identify import ServerKind
from dflash_trt.observe.endpoints.metrics_page import MetricsPage
from dflash_trt.observe.endpoints.observed_acceptance import drafting
from dflash_trt.observe.traffic.window import Window

NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?(e[-+]?[0-9]+)?|\+Inf")


class EngineTraffic(EngineAcceptance, frozen=True, kw_only=True):
    """Growth of one engine's counters; `engine` is what its labels say, empty for a server that has none."""

    proposed: int | None
    """None where the runtime does not publish it."""
    accepted_by_position: list[int]
    """Empty where the runtime does not publish it."""

    @property
    def acceptance(self) -> Acceptance:
        return drafting(self.drafting_passes, self.accepted, self.proposed, self.accepted_by_position)


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """A window; None for what the runtime does not publish."""

    seconds: float
    engines: list[EngineTraffic]
    prefix_queries: float | None
    """Prompt tokens that were looked up in the prefix cache."""
    hit_rate: float | None
    """Share of them that it held."""
    preemptions: float | None
    cache_use: float | None
    """Share of the KV cache in use, the mean over engines."""
    waiting: float | None
    """Requests in the queue: at the end of the window, or on average where Prometheus was asked."""
    tpot_seconds: float | None
    """Mean time per output token (TPOT) of requests."""
    tpot_p95_seconds: float | None
    """Their 95th percentile, interpolated in the histogram."""

    @property
    def acceptance(self) -> Acceptance:
        """All engines together."""
        return sum((each.acceptance for each in self.engines), Acceptance(passes=None, emitted=None))

    @property
    def output_tokens(self) -> int:
        return sum(each.output_tokens for each in self.engines)


def traffic_of(window: Window, kind: ServerKind, model: str | None = None) -> Traffic:
    """The figures of `model`, or of the only one; raises EndpointError where several are published."""
    names, growth = COUNTER_NAMES[kind], window.growth
    models = {labels.get(MODEL_LABEL, "") for labels, _ in growth.samples.get(names.output_tokens, ())}
    if not models:
        raise EndpointError(
            f"{growth.where} has no {names.output_tokens}", hint="doctor URL says what a server publishes"
        )
    if model is None and len(models) > 1:
        raise EndpointError(
            f"{growth.where} has several models: {shown(sorted(models))}", hint="choose one with --model"
        )
    gauges = window.gauges
    if model is not None:  # with the samples that name none
        growth, gauges = (
            page.only(lambda labels: labels.get(MODEL_LABEL, model) == model) for page in (growth, gauges)
        )
    queries, hits, preemptions = (
        _sum(growth, of) for of in (names.prefix_queries, names.prefix_hits, names.preemptions)
    )
    rate = _mean(gauges, (names.hit_rate,)) if queries is None else (hits or 0.0) / queries if queries else None
    count = growth.total(f"{names.tpot}_count")
    engines = [
        _engine_traffic(engine, acceptance_of(page, names), page.total(names.output_tokens))
        for engine, page in by_engine(growth, names).items()
    ]
    return Traffic(
        seconds=window.seconds, engines=engines, prefix_queries=queries, hit_rate=rate,
        preemptions=preemptions, cache_use=_mean(gauges, names.cache_use), waiting=_sum(gauges, (names.waiting,)),
        tpot_seconds=growth.total(f"{names.tpot}_sum") / count if count else None,
        tpot_p95_seconds=_quantile(growth, f"{names.tpot}_bucket", 0.95),
    )  # fmt: skip


def _engine_traffic(engine: str, counts: Acceptance, output_tokens: float) -> EngineTraffic:
    return EngineTraffic(
        engine=engine, drafting_passes=counts.drafting_passes, accepted=counts.accepted,
        output_tokens=round(output_tokens), proposed=counts.proposed,
        accepted_by_position=list(counts.accepted_by_position),
    )  # fmt: skip


def _sum(page: MetricsPage, names: tuple[str, ...]) -> float | None:
    """The first of `names` that is published."""
    return next((page.total(name) for name in names if page.has(name)), None)


def _mean(page: MetricsPage, names: tuple[str, ...]) -> float | None:
    name = next((name for name in names if page.has(name)), None)
    return None if name is None else page.total(name) / len(page.samples[name])


def _quantile(page: MetricsPage, name: str, share: float) -> float | None:
    """Linear in its bucket, as PromQL's histogram_quantile; the last bound for what lies beyond it."""
    totals: dict[float, float] = {}
    for labels, value in page.samples.get(name, ()):
        if (bound := labels.get("le", "")) and NUMBER.fullmatch(bound):
            totals[float(bound)] = totals.get(float(bound), 0.0) + value
    bounds = sorted(totals)
    if len(bounds) < 2 or not totals[bounds[-1]]:
        return None
    rank, low, below = share * totals[bounds[-1]], 0.0, 0.0
    for high in bounds[:-1]:
        if totals[high] >= rank:
            return low + (high - low) * (rank - below) / (totals[high] - below)
        low, below = high, totals[high]
    return low
