# SPDX-License-Identifier: Apache-2.0
"""A page of Prometheus metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dflash_trt.errors import EndpointError, shown
from dflash_trt.observe.endpoints.client import Client

POSITION = re.compile("[0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Samples by name; each has its labels and value."""

    where: str
    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]]

    @classmethod
    def parse(cls, content: bytes, where: str) -> MetricsPage:
        """Parses a page; raises EndpointError if it is malformed."""
        from prometheus_client.parser import text_string_to_metric_families

        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(content.decode()):
                for sample in family.samples:
                    samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
        except (ValueError, KeyError, IndexError) as error:
            raise EndpointError(f"{where}: the metrics are not in Prometheus's text format: {error}") from None
        return cls(where, {name: tuple(values) for name, values in samples.items()})

    def has(self, name: str) -> bool:
        return name in self.samples

    def total(self, name: str) -> float:
        """Over all labels (engines of a data-parallel server); 0 where there is none yet."""
        return sum(value for _, value in self.samples.get(name, ()))

    def count(self, name: str) -> int:
        """`total` of a counter of whole things; raises EndpointError unless it is a whole number."""
        value = self.total(name)
        if not (value >= 0 and value == int(value) if abs(value) < 2**63 else False):
            raise EndpointError(f"{self.where}: expected {name} as a count, found {value}")
        return int(value)

    def only(self, fits: Callable[[Mapping[str, str]], bool]) -> MetricsPage:
        """The samples whose labels fit; names without any are left out."""
        kept = {name: tuple(each for each in samples if fits(each[0])) for name, samples in self.samples.items()}
        return MetricsPage(self.where, {name: samples for name, samples in kept.items() if samples})

    def positions(self, name: str, label: str) -> tuple[float, ...]:
        """Totals at position 0, 1, ..., with fractions where Prometheus extrapolated them.

        Raises EndpointError for a malformed position.
        """
        totals: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            key = labels.get(label, "")
            totals[key] = totals.get(key, 0.0) + value
        if not all(map(POSITION.fullmatch, totals)):
            raise EndpointError(
                f"{self.where}: expected {name} by {label} 0, 1, ..., found {shown(sorted(totals)[:8])}"
            )
        by_position = {int(position): total for position, total in totals.items()}
        return tuple(by_position.get(position, 0.0) for position in range(max(by_position, default=-1) + 1))


def read_page(client: Client, path: str) -> MetricsPage:
    """The page at a path of the server; raises EndpointError."""
    return MetricsPage.parse(client.get(path), f"{client.url}{path}")
