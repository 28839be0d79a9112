# SPDX-License-Identifier: Apache-2.0
"""Growth of a server's counters between two readings of its page."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.counter_growth import grown
from dflash_trt.observe.endpoints.counter_names import CounterNames
from dflash_trt.observe.endpoints.metrics_page import MetricsPage, read_page


@dataclass(frozen=True, slots=True)
class Window:
    """Growth of counters by name and labels in `seconds`, and gauges at its end."""

    growth: MetricsPage
    gauges: MetricsPage
    seconds: float


def watched(client: Client, names: CounterNames, seconds: float) -> Window:
    """Reads the page twice, `seconds` apart; raises EndpointError if the server restarted in between."""
    before, began = read_page(client, names.path), time.monotonic()
    time.sleep(seconds)
    after = read_page(client, names.path)
    return Window(grown(before, after, names.counters), after, time.monotonic() - began)
