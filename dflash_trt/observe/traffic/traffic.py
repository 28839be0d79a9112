# SPDX-License-Identifier: Apache-2.0
"""A window's figures under one set of names: acceptance by engine and position, caches, queue, speed per user."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.errors import EndpointError, shown
from dflash_trt.observe.diagnosis.engine_acceptance import EngineAcceptance
from dflash_trt.observe.endpoints.identify import ServerKind
from dflash_trt.observe.endpoints.metrics_page import MetricsPage
from dflash_trt.observe.endpoints.observed_acceptance import drafting
from dflash_trt.observe.traffic.counter_names import COUNTER_NAMES, ENGINE_LABELS, MODEL_LABEL, CounterNames
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
    growth, gauges = (_of_model(page, model) for page in (growth, window.gauges))
    queries, hits, preemptions = (
        _sum(growth, of) for of in (names.prefix_queries, names.prefix_hits, names.preemptions)
    )
    rate = _mean(gauges, (names.hit_rate,)) if queries is None else (hits or 0.0) / queries if queries else None
    count = growth.total(f"{names.tpot}_count")
    return Traffic(
        seconds=window.seconds, engines=_engines(growth, names, kind), prefix_queries=queries, hit_rate=rate,
        preemptions=preemptions, cache_use=_mean(gauges, names.cache_use), waiting=_sum(gauges, (names.waiting,)),
        tpot_seconds=growth.total(f"{names.tpot}_sum") / count if count else None,
        tpot_p95_seconds=_quantile(growth, f"{names.tpot}_bucket", 0.95),
    )  # fmt: skip


def _of_model(page: MetricsPage, model: str | None) -> MetricsPage:
    """Samples of `model`, and those without a model."""
    if model is None:
        return page
    kept = {
        name: tuple(sample for sample in samples if sample[0].get(MODEL_LABEL, model) == model)
        for name, samples in page.samples.items()
    }
    return MetricsPage(page.where, {name: samples for name, samples in kept.items() if samples})


def _engines(growth: MetricsPage, names: CounterNames, kind: ServerKind) -> list[EngineTraffic]:
    keys = {_engine(labels) for labels, _ in growth.samples.get(names.output_tokens, ())}
    return [_engine_traffic(growth, names, kind, key) for key in sorted(keys, key=lambda key: (len(key), key))]


def _engine(labels: Mapping[str, str]) -> str:
    return " ".join(labels[label] for label in ENGINE_LABELS if label in labels)


def _engine_traffic(growth: MetricsPage, names: CounterNames, kind: ServerKind, engine: str) -> EngineTraffic:
    of_engine = {
        name: tuple(sample for sample in samples if _engine(sample[0]) == engine)
        for name, samples in growth.samples.items()
    }
    page = MetricsPage(growth.where, of_engine)
    output, passes = page.total(names.output_tokens), page.total(names.passes)
    positions = [round(value) for value in page.positions(names.positions, names.position_label)]
    proposed = page.total(names.proposed) if names.proposed else None
    if kind == "sglang":  # it counts no accepted drafts: see SglangMeter
        accepted = max(0.0, output - page.total(names.requests) - passes)
    elif kind == "tensorrt-llm":  # drafted at position 0 is once a pass
        drafted = [round(value) for value in page.positions(names.passes, names.position_label)]
        proposed, passes, accepted = float(sum(drafted)), float(next(iter(drafted), 0)), float(sum(positions))
    else:
        accepted = page.total(names.accepted)
    return EngineTraffic(
        engine=engine, drafting_passes=round(passes), accepted=round(accepted), output_tokens=round(output),
        proposed=None if proposed is None else round(proposed), accepted_by_position=positions,
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
