# SPDX-License-Identifier: Apache-2.0
"""What one request of a probe brought, and probes as groups of them."""

from __future__ import annotations

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Figures that the server does not publish are None."""

    prompt: str
    """Its name: the same in two diagnoses is the same text."""
    text: str
    """SHA-256 of the answer, of what was thought, too."""
    output_tokens: int
    input_tokens: int | None = None
    cached_tokens: int | None = None
    seconds: float
    steps: int | None = None
    """Verify passes with a draft."""
    proposed: int | None = None
    accepted: int | None = None
    by_position: tuple[int, ...] = ()
    tau: float | None = None

    @property
    def per_step(self) -> float | None:
        """Accepted drafts per verify pass, tau - 1; None without a pass."""
        return None if self.tau is None else self.tau - 1

    @property
    def first(self) -> float | None:
        """Share of passes that accepted their first draft: it does not depend on how long drafts are."""
        return self.by_position[0] / self.steps if self.steps and self.by_position else None


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one probe, in order."""

    name: str
    samples: list[Sample] = []
    why_not: str = ""
    """Why there are no samples, or not all."""

    @property
    def steps(self) -> int:
        """Of all samples."""
        return sum(sample.steps or 0 for sample in self.samples)

    @property
    def tau(self) -> float | None:
        """Over all passes; a mean of samples where only averages are published."""
        if self.steps:
            accepted = sum(sample.accepted or 0 for sample in self.samples)
            return (accepted + self.steps) / self.steps
        found = [sample.tau for sample in self.samples if sample.tau is not None]
        return sum(found) / len(found) if found else None

    @property
    def draft_length(self) -> float | None:
        """Mean number of verified drafts in a pass."""
        proposed = [sample.proposed for sample in self.samples]
        if not self.steps or None in proposed:
            return None
        return sum(count or 0 for count in proposed) / self.steps

    @property
    def by_position(self) -> list[float]:
        """Share of passes that accepted the draft at position 0, 1, ..."""
        width = max((len(sample.by_position) for sample in self.samples), default=0)
        counts = [sum(s.by_position[i] for s in self.samples if i < len(s.by_position)) for i in range(width)]
        return [count / self.steps for count in counts] if self.steps else []

    def values(self, *, is_first: bool) -> dict[str, float]:
        """Prompt -> accepted drafts per pass, or the first draft's acceptance."""
        found = {sample.prompt: sample.first if is_first else sample.per_step for sample in self.samples}
        return {name: value for name, value in found.items() if value is not None}
