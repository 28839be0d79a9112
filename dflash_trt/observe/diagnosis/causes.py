# SPDX-License-Identifier: Apache-2.0
"""Why it goes wrong: what each cause is, who documented it, and what to change, in the words of each runtime."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.endpoints.identify import ServerKind


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A likely cause, for the runtime that was asked."""

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
    return read_json(Path(__file__).with_suffix(".json"), dict[str, CauseEntry], ConfigError, what="the package's data")


def causes(kind: ServerKind, *names: str) -> list[Cause]:
    entries = [(name, cause_entries()[name]) for name in names]
    return [Cause(name=n, what=e.what, source=e.source, setting=e.settings.get(kind, e.setting)) for n, e in entries]
