# SPDX-License-Identifier: Apache-2.0
"""What drafts were worth, in one set of words whatever a server calls it.

tau = (accepted + steps) / steps: accepted drafts and the bonus token, per verify pass that verified a draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_trt.errors import EndpointError, shown

Source = Literal["counters", "gauges", "per request", "not published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Between two moments, or of one request. What a server does not publish is None, never guessed."""

    source: Source
    how: str
    """From which figures of the server, and how they were converted; where none, why."""
    steps: int | None = None
    """Verify passes that verified at least one draft, summed over requests."""
    proposed: int | None = None
    accepted: int | None = None
    by_position: tuple[int, ...] = ()
    """Accepted drafts at position 0, 1, ... of the block."""
    sampled_tau: float | None = None
    """Where only an average is published."""
    output_tokens: int | None = None
    """The server's own count in the same time: larger than the requests' where somebody else asks it, too."""

    @property
    def tau(self) -> float | None:
        """Accepted drafts and the bonus, per verify pass; None where no draft was verified."""
        if self.steps and self.accepted is not None:
            return (self.accepted + self.steps) / self.steps
        return self.sampled_tau


def of_request(figures: Mapping[str, object], where: str) -> Acceptance:
    """vLLM's `metrics.speculative_decoding` of one answer, which ours has, too."""

    def count(name: str) -> int:
        value = figures.get(name)
        if not isinstance(value, int) or value < 0:
            raise EndpointError(f"{where}: expected speculative_decoding.{name} as a count, found {shown(value)}")
        return value

    histogram = figures.get("acceptance_histogram") or []
    if not isinstance(histogram, list) or not all(isinstance(value, int) for value in histogram):
        raise EndpointError(f"{where}: expected an acceptance_histogram of counts, found {shown(histogram)}")
    return Acceptance(
        source="per request",
        how="metrics.speculative_decoding of the answer",
        steps=count("num_spec_steps"),
        proposed=count("num_draft_tokens"),
        accepted=count("num_accepted_draft_tokens"),
        by_position=_by_position(histogram),
    )


def _by_position(histogram: Sequence[int]) -> tuple[int, ...]:
    """Entry n of `histogram` counts the passes that accepted n drafts; of the result, those that accepted draft n."""
    return tuple(sum(histogram[position + 1 :]) for position in range(len(histogram) - 1))
