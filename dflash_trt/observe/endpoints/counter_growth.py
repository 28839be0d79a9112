# SPDX-License-Identifier: Apache-2.0
"""Growth of a server's counters between two pages, and the acceptance that follows from it, also of each engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import msgspec

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.counter_names import VLLM, CounterNames
from dflash_trt.observe.endpoints.metrics_page import MetricsPage, read_page
from dflash_trt.observe.endpoints.observed_acceptance import drafting

ENGINE_LABELS = ("instance", "engine", "dp_rank")
"""Labels that tell engines apart: a scraped server, and the data-parallel ranks of vLLM and SGLang."""
Labels = frozenset[tuple[str, str]]


def grown(before: MetricsPage, after: MetricsPage, names: Iterable[str]) -> MetricsPage:
    """By how much each counter of `names` grew; raises EndpointError where one fell or went."""
    samples = {}
    for name in names:
        begins, ends = _by_labels(before, name), _by_labels(after, name)
        if begins.keys() - ends.keys() or any(ends[labels] < value for labels, value in begins.items()):
            raise EndpointError(
                f"{after.where}: {name} fell between the two readings",
                hint="the server was restarted in between: measure again",
            )
        if ends:
            samples[name] = tuple((dict(labels), value - begins.get(labels, 0.0)) for labels, value in ends.items())
    return MetricsPage(after.where, samples)


def acceptance_of(growth: MetricsPage, names: CounterNames) -> Acceptance:
    """The counts of drafts, rounded where Prometheus extrapolated them; all are 0 where nothing was published."""
    positions = [round(count) for count in growth.positions(names.positions, names.position_label)]
    passes, proposed = growth.total(names.passes), growth.total(names.proposed) if names.proposed else None
    if names.drafts_by_position:
        drafted = [round(count) for count in growth.positions(names.passes, names.position_label)]
        passes, proposed, accepted = float(next(iter(drafted), 0)), float(sum(drafted)), float(sum(positions))
    elif names.accepted:
        accepted = growth.total(names.accepted)
    else:
        accepted = max(0.0, growth.total(names.output_tokens) - growth.total(names.requests) - passes)
    return drafting(round(passes), round(accepted), None if proposed is None else round(proposed), positions)


def by_engine(growth: MetricsPage, names: CounterNames) -> dict[str, MetricsPage]:
    """Growth of each engine, by its labels; one without a name for a server that does not tell them apart."""
    engines = {_engine(labels) for labels, _ in growth.samples.get(names.output_tokens, ())}
    return {
        engine: growth.only(partial(_is_of, engine)) for engine in sorted(engines, key=lambda name: (len(name), name))
    }


def _is_of(engine: str, labels: Mapping[str, str]) -> bool:
    return _engine(labels) == engine


def _engine(labels: Mapping[str, str]) -> str:
    return " ".join(labels[label] for label in ENGINE_LABELS if label in labels)


def _by_labels(page: MetricsPage, name: str) -> Mapping[Labels, float]:
    return {frozenset(labels.items()): value for labels, value in page.samples.get(name, ())}


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
