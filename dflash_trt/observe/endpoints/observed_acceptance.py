# SPDX-License-Identifier: Apache-2.0
"""What drafts were worth, in one set of words whatever a server calls it.

Servers count the passes that verified a draft, and no others: what is known from outside is tau of drafting passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_trt.errors import EndpointError, shown
from dflash_trt.runtime.acceptance import Acceptance

Source = Literal["counters", "gauges", "per request", "not published", "unreadable"]
"""unreadable: the server publishes something, and it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedAcceptance:
    """Between two moments, or of one request. What a server does not publish is None, never guessed."""

    source: Source
    how: str
    """From which figures of the server, and how they were converted; where none, why."""
    counts: Acceptance | None = None
    """None where only an average is published, or nothing."""
    sampled_tau: float | None = None
    """Tau of drafting passes, where only an average is published."""
    output_tokens: int | None = None
    """The server's own count in the same time: larger than the requests' where somebody else asks it, too."""

    @property
    def tau_of_drafting_passes(self) -> float | None:
        """None where no draft was verified."""
        return self.sampled_tau if self.counts is None else self.counts.tau_of_drafting_passes


def drafting(drafting_passes: int, accepted: int, proposed: int | None, by_position: Sequence[int] = ()) -> Acceptance:
    """The counts of a server that leaves passes without drafts out."""
    return Acceptance(
        passes=None,
        drafting_passes=drafting_passes,
        emitted=None,
        proposed=proposed,
        accepted=accepted,
        accepted_by_position=tuple(by_position),
    )


def of_request(figures: Mapping[str, object], where: str) -> ObservedAcceptance:
    """vLLM's `metrics.speculative_decoding` of one answer, which ours has, too."""

    def count(name: str) -> int:
        value = figures.get(name)
        if not isinstance(value, int) or value < 0:
            raise EndpointError(f"{where}: expected speculative_decoding.{name} as a count, found {shown(value)}")
        return value

    histogram = figures.get("acceptance_histogram") or []
    if not isinstance(histogram, list) or not all(isinstance(value, int) for value in histogram):
        raise EndpointError(f"{where}: expected an acceptance_histogram of counts, found {shown(histogram)}")
    passes, accepted = count("num_spec_steps"), count("num_accepted_draft_tokens")
    counts = drafting(passes, accepted, count("num_draft_tokens"), _by_position(histogram))
    return ObservedAcceptance(source="per request", how="metrics.speculative_decoding of the answer", counts=counts)


def _by_position(histogram: Sequence[int]) -> tuple[int, ...]:
    """From passes that accepted exactly 0, 1, ... drafts: those that accepted the draft at position 1, 2, ..."""
    return tuple(sum(histogram[position:]) for position in range(1, len(histogram)))
