# SPDX-License-Identifier: Apache-2.0
"""Published acceptance lengths of targets with their DFlash drafts and MTP layers.

Servers are compared with them, and `estimate` takes its means from here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from dflash_trt.deploy.trained_target import is_copy
from dflash_trt.files.json_file import package_data
from dflash_trt.observe.endpoints.identify import Runtime


class PublishedTau(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Range of tau of one pair at one draft length."""

    target: str
    draft: str | None = None
    """None where its name is not stated, and for MTP."""
    num_draft_tokens: int
    lowest: float
    prompts: str
    """Prompts of the lowest figure."""
    mean: float
    highest: float
    highest_prompts: str
    source: str

    def __str__(self) -> str:
        """'2.7 (MT-Bench) to 3.3 (GSM8K) for 3 drafts, card of z-lab/gpt-oss-120b-DFlash'."""
        ends = f"{self.lowest:g} ({self.prompts}) to {self.highest:g} ({self.highest_prompts})"
        return f"{ends} for {self.num_draft_tokens} drafts, {self.source}"


class _Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    note: str
    pairs: tuple[PublishedTau, ...]
    mtp: tuple[PublishedTau, ...]


@cache
def _published() -> _Published:
    return package_data(Path(__file__).with_name("published_tau.json"), _Published)


def published_taus() -> tuple[PublishedTau, ...]:
    """All DFlash drafts' figures."""
    return _published().pairs


def published_draft_tau(draft: str) -> PublishedTau | None:
    """The figure of a DFlash draft, by repository id, at its longest published draft length."""
    of_draft = [entry for entry in published_taus() if entry.draft == draft]
    return max(of_draft, key=lambda entry: entry.num_draft_tokens, default=None)


def published_mtp_tau(target: str) -> PublishedTau | None:
    """The figure of a target's MTP layers, by repository id."""
    return next((entry for entry in _published().mtp if entry.target == target), None)


def published_tau(runtime: Runtime, draft_length: float | None) -> PublishedTau | None:
    """The figure of the server's target, by name, at the longest published draft length that the server reaches."""
    if draft_length is None:
        return None
    fitting = [
        entry for entry in published_taus()
        if entry.num_draft_tokens <= draft_length + 0.5
        and any(is_copy(name, entry.target) for name in (runtime.target, runtime.model))
    ]  # fmt: skip
    return max(fitting, key=lambda entry: entry.num_draft_tokens, default=None)
