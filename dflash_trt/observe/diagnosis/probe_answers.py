# SPDX-License-Identifier: Apache-2.0
"""Results of a probe's requests, in groups, and the prompts they ask."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import package_data
from dflash_trt.files.read import read_text

CONTINUE = "Continue this Python file.\n\n```python\n"

UNPUBLISHED = Acceptance(passes=None, emitted=None, proposed=None)


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Figures that the server does not publish are None."""

    prompt: str
    """Name of the prompt; equal names in two diagnoses mean equal texts."""
    text: str
    """SHA-256 of the answer, including its thinking."""
    output_tokens: int
    input_tokens: int | None = None
    cached_tokens: int | None = None
    seconds: float
    acceptance: Acceptance | None = None
    tau_of_drafting_passes: float | None = None
    """Computed from the counts, or the average if a server publishes only that."""

    @property
    def accepted_per_pass(self) -> float | None:
        """Accepted drafts per drafting pass; None without a pass."""
        return None if self.tau_of_drafting_passes is None else self.tau_of_drafting_passes - 1

    @property
    def first_acceptance(self) -> float | None:
        """Share of passes that accepted their first draft token, which does not depend on the length of drafts."""
        counts = self.acceptance
        if counts is None or not counts.drafting_passes or not counts.accepted_by_position:
            return None
        return counts.accepted_by_position[0] / counts.drafting_passes


class ProbeGroup(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    samples: list[ProbeAnswer] = []
    why_not: str = ""
    """Why samples are missing."""
    is_left_out: bool = False
    """Whether missing samples are no fault: this server cannot, or need not, be probed."""

    @property
    def acceptance(self) -> Acceptance:
        return sum((sample.acceptance or UNPUBLISHED for sample in self.samples), Acceptance())

    @property
    def tau_of_drafting_passes(self) -> float | None:
        """Over all passes; a mean of samples if only averages are published."""
        if (tau := self.acceptance.tau_of_drafting_passes) is not None:
            return tau
        taus = [sample.tau_of_drafting_passes for sample in self.samples if sample.tau_of_drafting_passes is not None]
        return sum(taus) / len(taus) if taus else None

    @property
    def draft_length(self) -> float | None:
        return self.acceptance.draft_length

    @property
    def shares_by_position(self) -> list[float]:
        """Share of drafting passes that accepted the draft at position 1, 2, ..."""
        return self.acceptance.shares_by_position

    @property
    def pooled_values(self) -> list[float]:
        """A value for each request: their mean is the accepted drafts per pass of all passes together.

        They scatter as that ratio does (linearised), so that the figure which is printed is also the one judged. A
        server that publishes only averages has one value for each average.
        """
        counts = [
            sample.acceptance for sample in self.samples if sample.acceptance and sample.acceptance.drafting_passes
        ]
        if not counts:
            return list(self.values(is_first=False).values())
        passes = sum(count.drafting_passes for count in counts)
        pooled = sum(count.accepted for count in counts) / passes
        return [
            pooled + (count.accepted - pooled * count.drafting_passes) * len(counts) / passes for count in counts
        ]  # fmt: skip

    def values(self, *, is_first: bool) -> dict[str, float]:
        """Prompt -> accepted draft tokens per pass, or the first one's acceptance."""
        values = {
            sample.prompt: sample.first_acceptance if is_first else sample.accepted_per_pass for sample in self.samples
        }
        return {name: value for name, value in values.items() if value is not None}


class ProbePrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chat: str
    """A user's message."""
    text: str
    """A completion's prompt."""


class Prompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name -> question."""

    short: dict[str, ProbePrompt]
    foreign: dict[str, ProbePrompt]


@cache
def prompts() -> Prompts:
    return package_data(Path(__file__).with_name("probe_prompts.json"), Prompts)


def passage(index: int, count: int, num_characters: int) -> ProbePrompt:
    """Passage `index` of `count` of a long text."""
    text = _source()
    begin = index * max(0, len(text) - num_characters) // max(1, count)
    taken = text[begin : begin + num_characters]
    return ProbePrompt(f"{CONTINUE}{taken}", taken)


@cache
def _source() -> str:
    """A long text that every installation has: this package's own source code."""
    package = Path(__file__).parents[2]
    files = [file for room in ("checkpoint", "cli", "deploy") for file in sorted((package / room).glob("*.py"))]
    return "\n\n".join(read_text(file, ConfigError, limit=2**20) for file in files)
