# SPDX-License-Identifier: Apache-2.0
"""Checks of a server: found a fault, fine, or not measured, and why."""

from __future__ import annotations

from typing import Literal

import msgspec

from dflash_trt.observe.diagnosis.causes import EndpointFinding, finding
from dflash_trt.observe.endpoints.identify import ServerKind

NOT_MEASURED = "not measured"


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
