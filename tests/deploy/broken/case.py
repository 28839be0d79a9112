# SPDX-License-Identifier: Apache-2.0
"""A deliberately broken configuration."""

from __future__ import annotations

from typing import Any

import msgspec

from dflash_trt.deploy.finding import ERROR
from dflash_trt.deploy.schema import Runtime

REMOVED = object()
SPEC = "speculative_config"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a good configuration, and what must be said about it."""

    rule: str
    key: str
    words: str
    runtime: Runtime = "trtllm"
    change: dict[str, Any] = {}
    """By dotted path."""
    gpus: str = "h200x8"
    version: str | None = None
    severity: str = ERROR
    also: tuple[str, ...] = ()
    """Other rules that refuse the same change."""
