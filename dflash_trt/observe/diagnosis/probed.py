# SPDX-License-Identifier: Apache-2.0
"""The answers of all probes."""

from __future__ import annotations

import msgspec

from dflash_trt.observe.diagnosis.engine_acceptance import EngineAcceptance
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.diagnosis.speed_probe import Speed

NO_LOAD = "left out by --no-load"


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the probes."""

    short: ProbeGroup
    served: ProbeGroup
    seeds: tuple[ProbeGroup, ProbeGroup]
    prefixes: tuple[ProbeGroup, ProbeGroup]
    long: ProbeGroup
    plain: ProbeGroup
    foreign: ProbeGroup
    thinking: tuple[ProbeGroup, ProbeGroup]
    speeds: list[Speed]
    speeds_missing: str
    """Why speeds are missing."""
    unreadable: str
    """Why published figures could not be read."""
    how: str
    """The figures from which acceptance was read, or why there are none."""

    engines: list[EngineAcceptance] = []
    """Over all probes; empty for a server that does not tell its engines apart."""

    @property
    def groups(self) -> list[ProbeGroup]:
        """In the order in which they were asked."""
        return [
            self.short, self.served, *self.seeds, *self.prefixes, self.long, self.plain, self.foreign, *self.thinking
        ]  # fmt: skip
