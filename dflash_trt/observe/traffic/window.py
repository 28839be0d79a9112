# SPDX-License-Identifier: Apache-2.0
"""Growth of a server's counters between two readings of its page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.counter_growth import RESTARTED
from dflash_trt.observe.endpoints.metrics_page import MetricsPage
from dflash_trt.observe.traffic.counter_names import CounterNames

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Window:
    """Growth of counters by name and labels in `seconds`, and gauges at its end."""

    growth: MetricsPage
    gauges: MetricsPage
    seconds: float


def watched(client: Client, names: CounterNames, seconds: float) -> Window:
    """Reads the page twice, `seconds` apart; raises EndpointError if the server restarted in between."""
    before, began = _page(client, names), time.monotonic()
    time.sleep(seconds)
    after = _page(client, names)
    return Window(grown(before, after, names), after, time.monotonic() - began)


def _page(client: Client, names: CounterNames) -> MetricsPage:
    return MetricsPage.parse(client.get(names.path), f"{client.url}{names.path}")


def grown(before: MetricsPage, after: MetricsPage, names: CounterNames) -> MetricsPage:
    """By how much each counter of `names` grew; raises EndpointError where one fell or went."""
    samples = {}
    for name in names.counters:
        begins, ends = _by_labels(before, name), _by_labels(after, name)
        if begins.keys() - ends.keys() or any(ends[labels] < value for labels, value in begins.items()):
            raise EndpointError(f"{after.where}: {name} fell between the two readings", hint=RESTARTED)
        if ends:
            samples[name] = tuple((dict(labels), value - begins.get(labels, 0.0)) for labels, value in ends.items())
    return MetricsPage(after.where, samples)


def _by_labels(page: MetricsPage, name: str) -> Mapping[Labels, float]:
    return {frozenset(labels.items()): value for labels, value in page.samples.get(name, ())}
