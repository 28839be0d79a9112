# SPDX-License-Identifier: Apache-2.0
"""One thing that a command may need: is it here, and if not, how does it come here?"""

from __future__ import annotations

import msgspec


class MachineFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a command may need."""

    name: str
    found: str | None
    """Version or description; None when it is missing."""
    needed_for: tuple[str, ...] = ()
    fix: str | None = None
    """The next command to run when it is missing."""
