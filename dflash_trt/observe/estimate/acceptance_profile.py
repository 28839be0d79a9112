# SPDX-License-Identifier: Apache-2.0
"""Acceptance by draft position: from one tau, or as `verify` measured it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json


class AcceptanceProfile(msgspec.Struct, frozen=True):
    """Probability that a draft is accepted once all earlier ones were, by position."""

    shares: tuple[float, ...]

    def tau(self, num_draft_tokens: int) -> float:
        """Tokens of a pass that verifies K drafts, the bonus included: 1 + p1 + p1 p2 + ..., from 1 to K + 1.

        Positions beyond the measured ones are accepted as often as the last one.
        """
        tokens = reached = 1.0
        for position in range(num_draft_tokens):
            reached *= self.shares[min(position, len(self.shares) - 1)]
            tokens += reached
        return tokens


def from_tau(tau: float, num_draft_tokens: int) -> AcceptanceProfile:
    """The profile, equal at every position, that gives `tau`; raises ConfigError for an impossible tau."""
    if not 1 <= tau <= num_draft_tokens + 1:
        raise ConfigError(f"tau: expected 1 to {num_draft_tokens + 1} for {num_draft_tokens} drafts, found {tau:g}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if AcceptanceProfile((middle,)).tau(num_draft_tokens) < tau else (low, middle)
    return AcceptanceProfile((high,))


class _Position(msgspec.Struct, frozen=True):
    position: int
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None


class _Engine(msgspec.Struct, frozen=True):
    acceptance: list[_Position]


class _Report(msgspec.Struct, frozen=True):
    schema: str
    engine: _Engine


def read_acceptance(file: Path, num_draft_tokens: int) -> AcceptanceProfile:
    """The profile in a document of `verify --json`; raises ConfigError unless it is for K `num_draft_tokens`."""
    hint = "dflash-trt verify ENGINE --target TARGET --prompts FILE --json > verify.json"
    report = read_json(file, _Report, ConfigError, what="the document of `dflash-trt verify --json`", hint=hint)
    if not report.schema.startswith("dflash-trt/verify/"):
        raise ConfigError(f"{file}: expected a document of dflash-trt verify, found one of {report.schema!r}")
    shares = [entry.share for entry in sorted(report.engine.acceptance, key=lambda entry: entry.position)]
    if len(shares) != num_draft_tokens:
        raise ConfigError(f"{file}: expected acceptance of {num_draft_tokens} drafts, found {len(shares)}", hint=hint)
    judged = tuple(share for share in shares if share is not None)
    if not judged:
        raise ConfigError(f"{file}: no verify pass judged a draft")
    return AcceptanceProfile(judged)


def read_routing(file: Path, num_experts: int) -> Sequence[float]:
    """Measured routing: a JSON list with how often each expert was taken, in any unit."""
    counts = read_json(file, list[float], ConfigError, what=f"a JSON list of {num_experts} counts")
    if len(counts) != num_experts or min(counts) < 0 or not sum(counts) > 0:
        raise ConfigError(f"{file}: expected {num_experts} counts, none negative, found {len(counts)}")
    return counts
