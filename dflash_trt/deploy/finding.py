# SPDX-License-Identifier: Apache-2.0
"""Findings of a check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

ERROR: Literal["error"] = "error"
WARNING: Literal["warning"] = "warning"
ACCEPTED: Literal["accepted"] = "accepted"
"""A warning that the deployment file accepts."""
UNCHECKED: Literal["not checked"] = "not checked"
Severity = Literal["error", "warning", "accepted", "not checked"]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One problem and its fix."""

    rule: str
    severity: Severity
    key: str
    """Dotted path, or another subject."""
    problem: str
    """Expected and found values."""
    fix: str
    settings: dict[str, Any] = {}
    """Values that mend it, by dotted key or variable; empty where a person decides."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.key}: {self.problem}; {self.fix} [{self.rule}]"


def judged(findings: Iterable[Finding], accepted: Mapping[str, str], *, is_strict: bool = False) -> list[Finding]:
    """Mark warnings that a deployment accepts, with its reason; make the others errors if `is_strict`."""
    verdicts = []
    for finding in findings:
        if finding.severity == WARNING and finding.rule in accepted:
            finding = msgspec.structs.replace(finding, severity=ACCEPTED, fix=accepted[finding.rule])
        elif finding.severity == WARNING and is_strict:
            finding = msgspec.structs.replace(finding, severity=ERROR)
        verdicts.append(finding)
    return verdicts


def numbered(findings: Iterable[Finding], number: int) -> list[Finding]:
    """Findings of one of several servers in a file, counted from 1."""
    return [msgspec.structs.replace(each, key=f"server {number}: {each.key}") for each in findings]
