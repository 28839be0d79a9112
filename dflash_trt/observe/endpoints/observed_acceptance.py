# SPDX-License-Identifier: Apache-2.0
"""What drafts were worth, in one set of words whatever a server calls it, and what counts it.

Servers count the passes that verified a draft, and no others: what is known from outside is tau of drafting passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from dflash_trt.api.acceptance import Acceptance, Count
from dflash_trt.errors import EndpointError

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


class Meter:
    """One way to count; this one does not."""

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
        passes=None,
        drafting_passes=drafting_passes,
        emitted=None,
        proposed=proposed,
        accepted=accepted,
        accepted_by_position=tuple(by_position),
    )


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
