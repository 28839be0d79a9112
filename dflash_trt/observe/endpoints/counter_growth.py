# SPDX-License-Identifier: Apache-2.0
"""Growth of Prometheus counters between two pages."""

from __future__ import annotations

from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints.metrics_page import MetricsPage

RESTARTED = "the server was restarted in between: measure again"


def increase(before: MetricsPage, after: MetricsPage, name: str) -> int:
    """By how much a counter has grown; raises EndpointError where it went backwards."""
    return _difference(before.count(name), after.count(name), name, after.where)


def increase_by_position(before: MetricsPage, after: MetricsPage, name: str, label: str) -> tuple[int, ...]:
    """`increase` at position 1, 2, ..., whose label is 0, 1, ..."""
    ends, begins = (tuple(page.whole(name, value) for value in page.positions(name, label)) for page in (after, before))
    if len(ends) < len(begins):
        raise EndpointError(f"{after.where}: {name} has fewer positions than before", hint=RESTARTED)
    begins += (0,) * (len(ends) - len(begins))
    return tuple(_difference(begin, end, name, after.where) for begin, end in zip(begins, ends, strict=True))


def _difference(before: int, after: int, name: str, where: str) -> int:
    if after < before:
        raise EndpointError(f"{where}: {name} fell from {before} to {after}", hint=RESTARTED)
    return after - before
