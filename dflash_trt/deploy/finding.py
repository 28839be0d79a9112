# SPDX-License-Identifier: Apache-2.0
"""What a check finds in a configuration."""

from __future__ import annotations

from typing import Literal

import msgspec

ERROR: Literal["error"] = "error"
WARNING: Literal["warning"] = "warning"
UNCHECKED: Literal["not checked"] = "not checked"


class Finding(msgspec.Struct, frozen=True):
    """One problem: one line, and how to fix it."""

    rule: str
    severity: Literal["error", "warning", "not checked"]
    key: str
    """Dotted path, or what it is about."""
    problem: str
    """What was expected and what was found."""
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.key}: {self.problem}; {self.fix} [{self.rule}]"
