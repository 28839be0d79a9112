# SPDX-License-Identifier: Apache-2.0
"""Windows of a server's traffic: between two readings of its counters, or out of a Prometheus server, also days ago."""

from __future__ import annotations

import time
from dataclasses import dataclass
from urllib.parse import urlencode

import msgspec

from dflash_trt.errors import EndpointError
from dflash_trt.files.json_file import json_value
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.counter_growth import grown
from dflash_trt.observe.endpoints.counter_names import COUNTER_NAMES, CounterNames
from dflash_trt.observe.endpoints.identify import ServerKind
from dflash_trt.observe.endpoints.metrics_page import MetricsPage, read_page

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


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


class _Series(msgspec.Struct, frozen=True):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct, frozen=True, rename="camel"):
    result_type: str
    result: list[_Series]


class _Answer(msgspec.Struct, frozen=True):
    data: _Data


def scraped_kind(client: Client, match: str) -> ServerKind:
    """The runtime whose output tokens Prometheus has; raises EndpointError for none or several."""
    kinds = [kind for kind in COUNTER_NAMES if kind != "dflash-trt"]  # ours publishes vLLM's names
    found = [kind for kind in kinds if _query(client, _selected(COUNTER_NAMES[kind].output_tokens, match))]
    if len(found) == 1:
        return found[0]
    names = ", ".join(COUNTER_NAMES[kind].output_tokens for kind in found or kinds)
    problem = f"several runtimes are scraped: {names}" if found else f"no series of {names}"
    raise EndpointError(f"{client.url}: {problem}", hint="choose the servers with --match 'job=\"NAME\"'")


def window(client: Client, names: CounterNames, match: str, length: str, ago: str | None = None) -> Window:
    """Growth in the last `length`, or in that which ended `ago`: a number and one of s, m, h, d, w.

    Prometheus extrapolates it, and counts on over restarts. GET /api/v1/query of Prometheus 2 and 3:
    https://prometheus.io/docs/prometheus/latest/querying/api/.
    """
    offset = f" offset {ago}" if ago else ""

    def page(function: str, selected: tuple[str, ...]) -> MetricsPage:
        found = {
            name: _query(client, f"{function}({_selected(name, match)}[{length}]{offset})") for name in selected
        }  # fmt: skip
        return MetricsPage(client.url, {name: samples for name, samples in found.items() if samples})

    growth, gauges = page("increase", names.counters), page("avg_over_time", names.gauges)
    return Window(growth, gauges, float(length[:-1]) * UNIT_SECONDS[length[-1]])


def _selected(name: str, match: str) -> str:
    return f"{name}{{{match}}}" if match else name


def _query(client: Client, expression: str) -> tuple[tuple[dict[str, str], float], ...]:
    """Series and values of an instant vector; raises EndpointError for any other answer."""
    try:
        content = client.get(f"/api/v1/query?{urlencode({'query': expression})}")
    except EndpointError as error:
        if error.status == 404:
            hint = "give Prometheus's own address, as http://localhost:9090; a server's is doctor URL --passive"
            raise EndpointError(f"{client.url} is no Prometheus server: {error.message}", hint=hint) from None
        raise
    answer = json_value(content, f"{client.url}/api/v1/query", _Answer, EndpointError, what="a vector")
    try:
        values = tuple((series.metric, float(series.value[1])) for series in answer.data.result)
    except ValueError as error:
        raise EndpointError(f"{client.url}/api/v1/query: a value of the vector is no number: {error}") from None
    return tuple((labels, value) for labels, value in values if value == value)  # without NaN
