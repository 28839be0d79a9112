# SPDX-License-Identifier: Apache-2.0
"""Acceptance under one set of names, whatever a server calls it; the meters' interface; and Prometheus pages.

Servers count the passes that verified a draft, and no others: an observer sees tau of drafting passes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from dflash_trt.api.acceptance import Acceptance, Count
from dflash_trt.errors import EndpointError, shown

POSITION = re.compile("[0-9]{1,4}")

Source = Literal["counters", "gauges", "per request", "not published", "unreadable"]
"""unreadable: the server publishes something, and it cannot be read."""


class ObservedAcceptance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Acceptance between two moments, or of one request; None for what a server does not publish."""

    source: Source
    how: str
    """From which figures of the server, and how they were converted; where none, why."""
    counts: Acceptance | None = None
    """None where only an average is published, or nothing."""
    sampled_tau: Annotated[float, msgspec.Meta(ge=1, le=1e6)] | None = None
    """Tau of drafting passes, where only an average is published."""
    output_tokens: Count | None = None
    """The server's own count in the same time: larger than the requests' if another client asks it, too."""

    @property
    def is_published(self) -> bool:
        return self.source not in ("not published", "unreadable")

    @property
    def tau_of_drafting_passes(self) -> float | None:
        """None where no draft was verified."""
        return self.sampled_tau if self.counts is None else self.counts.tau_of_drafting_passes


class Meter:
    """Base of all meters."""

    sample_seconds: float | None = None
    """How often `sample` wants to be called while requests run; None: never."""

    def begin(self) -> None:
        """Now begins what is counted."""

    def sample(self) -> None:
        """Between `begin` and `end`."""

    def end(self) -> ObservedAcceptance:
        """What came since `begin`; raises EndpointError where counters went backwards: the server was restarted."""
        raise NotImplementedError


def drafting(drafting_passes: int, accepted: int, proposed: int | None, by_position: Sequence[int] = ()) -> Acceptance:
    """The counts of a server that leaves passes without drafts out."""
    return Acceptance(
        passes=None, drafting_passes=drafting_passes, emitted=None, proposed=proposed, accepted=accepted,
        accepted_by_position=tuple(by_position),
    )  # fmt: skip


class _RequestFigures(msgspec.Struct, frozen=True):
    num_spec_steps: Count
    num_accepted_draft_tokens: Count
    num_draft_tokens: Count
    acceptance_histogram: list[Count] | None = None
    """Passes that accepted exactly 0, 1, ... drafts."""


def of_request(figures: Mapping[str, object], where: str) -> ObservedAcceptance:
    """vLLM's `metrics.speculative_decoding` of one answer, which ours has, too."""
    try:
        request = msgspec.convert(figures, _RequestFigures)
    except msgspec.ValidationError as error:
        raise EndpointError(f"{where}: expected counts in speculative_decoding, found {error}") from None
    histogram = request.acceptance_histogram or []
    by_position = [sum(histogram[position:]) for position in range(1, len(histogram))]
    counts = drafting(request.num_spec_steps, request.num_accepted_draft_tokens, request.num_draft_tokens, by_position)
    return ObservedAcceptance(source="per request", how="metrics.speculative_decoding of the answer", counts=counts)


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
            raise EndpointError(f"{where}: expected Prometheus's text format, found: {error}") from None
        return cls(where, {name: tuple(values) for name, values in samples.items()})

    def has(self, name: str) -> bool:
        return name in self.samples

    def total(self, name: str) -> float:
        """Over all labels (engines of a data-parallel server); 0 where there is none yet."""
        return sum(value for _, value in self.samples.get(name, ()))

    def count(self, name: str) -> int:
        """`total` of a counter of whole things; raises EndpointError unless it is a whole number."""
        return self._whole(name, self.total(name))

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Totals of a counter by the value of one label."""
        totals: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            key = labels.get(label, "")
            totals[key] = totals.get(key, 0.0) + value
        return {key: self._whole(name, value) for key, value in totals.items()}

    def positions(self, name: str, label: str) -> tuple[int, ...]:
        """Totals of a counter at position 0, 1, ...; raises EndpointError for a malformed position."""
        totals = self.by_label(name, label)
        if not all(POSITION.fullmatch(key) for key in totals):
            raise EndpointError(
                f"{self.where}: expected {name} by {label} 0, 1, ..., found {shown(sorted(totals)[:8])}"
            )
        by_position = {int(key): value for key, value in totals.items()}
        return tuple(by_position.get(position, 0) for position in range(max(by_position, default=-1) + 1))

    def _whole(self, name: str, value: float) -> int:
        if not (value >= 0 and value == int(value) if abs(value) < 2**63 else False):
            raise EndpointError(f"{self.where}: expected {name} as a count, found {value}")
        return int(value)
