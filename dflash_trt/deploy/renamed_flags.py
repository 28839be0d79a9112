# SPDX-License-Identifier: Apache-2.0
"""Arguments of earlier releases, with those that took their place."""

from __future__ import annotations

from functools import cache

import msgspec

from dflash_trt.deploy.gpus import DATA
from dflash_trt.deploy.schema import Runtime
from dflash_trt.files.json_file import package_data

Names = dict[str, dict[str, str]]


class RenamedFlags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """renamed_flags.json: new names by old one, by runtime."""

    source: str
    renamed: Names
    """Arguments that the runtime refuses."""
    deprecated: Names
    """Arguments that it still reads."""

    def successor(self, runtime: Runtime, name: str) -> str | None:
        """The argument that took the place of `name`; None for any other name."""
        return (self.renamed.get(runtime, {}) | self.deprecated.get(runtime, {})).get(name)


@cache
def renamed_flags() -> RenamedFlags:
    """The package's data."""
    return package_data(DATA / "renamed_flags.json", RenamedFlags)
