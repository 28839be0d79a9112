# SPDX-License-Identifier: Apache-2.0
"""The interface of meters: acceptance between two moments."""

from __future__ import annotations

from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance


class Meter:
    """Base of all meters."""

    sample_seconds: float | None = None
    """How often `sample` wants to be called while requests run; None: never."""

    def begin(self) -> None:
        """Now begins what is counted."""

    def sample(self) -> None:
        """Between `begin` and `end`."""

    def end(self) -> ObservedAcceptance:
        """Counts since `begin`; raises EndpointError if counters went backwards, because the server was restarted."""
        raise NotImplementedError
