# SPDX-License-Identifier: Apache-2.0
"""Checks of a server: found a fault, fine, or not measured, and why; faults name their likely causes (causes.json)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from dflash_trt.files.json_file import package_data
from dflash_trt.observe.endpoints.identify import ServerKind

NOT_MEASURED = "not measured"


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A likely cause, for the diagnosed runtime."""

    name: str
    what: str
    source: str
    setting: str


class CauseEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cause, for every runtime."""

    what: str
    source: str
    setting: str
    """For runtimes that are not in `settings`."""
    settings: dict[ServerKind, str] = {}


@cache
def cause_entries() -> dict[str, CauseEntry]:
    return package_data(Path(__file__).with_name("causes.json"), dict[str, CauseEntry])


def causes(kind: ServerKind, *names: str) -> list[Cause]:
    entries = [(name, cause_entries()[name]) for name in names]
    return [Cause(name=n, what=e.what, source=e.source, setting=e.settings.get(kind, e.setting)) for n, e in entries]


class EndpointFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, or a fact worth knowing."""

    name: str
    figure: str
    causes: list[Cause]
    """Likely ones, in this order."""


def finding(kind: ServerKind, name: str, figure: str, *cause_names: str) -> EndpointFinding:
    """A finding with the causes of `cause_names`, for the diagnosed runtime."""
    return EndpointFinding(name=name, figure=figure, causes=causes(kind, *cause_names))


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check of a server, and its result."""

    name: str
    verdict: Literal["fine", "WRONG", "not measured"]
    figure: str
    """The measurement, or why there is none."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Every check; findings are the failed ones, `unmeasured` those that were possible but not made."""

    checks: list[Check]
    findings: list[EndpointFinding]
    unmeasured: list[EndpointFinding]
    notes: list[EndpointFinding]


class Checks:
    """Collects checks and their findings."""

    def __init__(self, kind: ServerKind, usual_reason: str = "slow") -> None:
        """`usual_reason`: name of the cause why checks cannot be made."""
        self.kind = kind
        self._usual_reason = usual_reason
        self.checks: list[Check] = []
        self.findings: list[EndpointFinding] = []
        self.unmeasured: list[EndpointFinding] = []

    def add(
        self, name: str, found: list[EndpointFinding], missing: str, figure: str, *, is_left_out: bool = False
    ) -> None:
        """A check that found something, found nothing, or was not made because something is `missing`.

        A missing requirement is a finding, too, unless it `is_left_out`.
        """
        self.findings += found
        verdict: Literal["fine", "WRONG", "not measured"] = "WRONG" if found else "not measured" if missing else "fine"
        self.checks.append(Check(name=name, verdict=verdict, figure=found[0].figure if found else missing or figure))
        if verdict == NOT_MEASURED and not is_left_out:
            self.unmeasured.append(finding(self.kind, f"{name} not measured", missing, self._usual_reason))

    def verdict(self, notes: list[EndpointFinding]) -> Verdict:
        """All checks, with `notes` that are no faults."""
        return Verdict(checks=self.checks, findings=self.findings, unmeasured=self.unmeasured, notes=notes)
