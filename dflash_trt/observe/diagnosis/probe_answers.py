# SPDX-License-Identifier: Apache-2.0
"""What one request of a probe brought, and probes as groups of them."""

from __future__ import annotations

import msgspec

from dflash_trt.api.acceptance import Acceptance

UNPUBLISHED = Acceptance(passes=None, emitted=None, proposed=None)


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Figures that the server does not publish are None."""

    prompt: str
    """Its name: the same in two diagnoses is the same text."""
    text: str
    """SHA-256 of the answer, of what was thought, too."""
    output_tokens: int
    input_tokens: int | None = None
    cached_tokens: int | None = None
    seconds: float
    acceptance: Acceptance | None = None
    tau_of_drafting_passes: float | None = None
    """Of these counts; where the server publishes only an average, that."""

    @property
    def accepted_per_pass(self) -> float | None:
        """Accepted drafts per drafting pass; None without a pass."""
        return None if self.tau_of_drafting_passes is None else self.tau_of_drafting_passes - 1

    @property
    def first_acceptance(self) -> float | None:
        """Share of passes that accepted their first draft: it does not depend on how long drafts are."""
        counts = self.acceptance
        if counts is None or not counts.drafting_passes or not counts.accepted_by_position:
            return None
        return counts.accepted_by_position[0] / counts.drafting_passes


class ProbeGroup(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    samples: list[ProbeAnswer] = []
    why_not: str = ""
    """Why there are no samples, or not all."""

    @property
    def acceptance(self) -> Acceptance:
        return sum((sample.acceptance or UNPUBLISHED for sample in self.samples), Acceptance())

    @property
    def tau_of_drafting_passes(self) -> float | None:
        """Over all passes; a mean of samples where only averages are published."""
        if (tau := self.acceptance.tau_of_drafting_passes) is not None:
            return tau
        taus = [sample.tau_of_drafting_passes for sample in self.samples if sample.tau_of_drafting_passes is not None]
        return sum(taus) / len(taus) if taus else None

    @property
    def draft_length(self) -> float | None:
        proposed, passes = self.acceptance.proposed, self.acceptance.drafting_passes
        return proposed / passes if passes and proposed is not None else None

    @property
    def shares_by_position(self) -> list[float]:
        """Share of drafting passes that accepted the draft at position 1, 2, ..."""
        counts = self.acceptance
        return (
            [count / counts.drafting_passes for count in counts.accepted_by_position] if counts.drafting_passes else []
        )

    def values(self, *, is_first: bool) -> dict[str, float]:
        """Prompt -> accepted drafts per pass, or the first draft's acceptance."""
        values = {
            sample.prompt: sample.first_acceptance if is_first else sample.accepted_per_pass for sample in self.samples
        }
        return {name: value for name, value in values.items() if value is not None}
