# SPDX-License-Identifier: Apache-2.0
"""Findings about an endpoint, and the causes that they name (causes.json)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from dflash_trt.files.json_file import package_data
from dflash_trt.observe.endpoints.identify import ServerKind


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
