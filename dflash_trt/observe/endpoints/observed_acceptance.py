# SPDX-License-Identifier: Apache-2.0
"""Acceptance under one set of names, for every server.

Servers count the passes that verified a draft, and no others: an observer sees tau of drafting passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from dflash_trt.api.acceptance import Acceptance, Count
from dflash_trt.errors import EndpointError

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
