# SPDX-License-Identifier: Apache-2.0
"""Servers that share nothing but their frontend: how many of a candidate serve a rate of requests on some GPUs.

Requests are taken to come evenly and to be divided evenly: bursts wait, or need more servers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from dflash_trt.observe.estimate.tuning import Candidate


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    num_gpus: int | None = None
    """All that there are, of one or more nodes; None: as many as it takes."""
    request_rate: float | None = None
    """Requests a second that all servers take together; None: as many as they can."""
    output_tokens: int
    """Of a request."""

    def replicas(self, candidate: Candidate) -> int:
        """Servers of a candidate: those that take the rate, else as many as the GPUs hold; 0 where neither can be."""
        most = None if self.num_gpus is None else self.num_gpus // candidate.tensor_parallel
        if self.request_rate is None:
            return 1 if most is None else most
        needed = math.ceil(self.request_rate / self.server_rate(candidate))
        return needed if most is None or needed <= most else 0

    def server_rate(self, candidate: Candidate) -> float:
        """Requests a second of one server."""
        return candidate.batch * candidate.user_rate / self.output_tokens

    def price(self, candidate: Candidate) -> float:
        """What is minimised: the GPUs that take the rate, or without one the throughput of all GPUs, negated."""
        replicas = self.replicas(candidate)
        if self.request_rate is not None:
            return float(replicas * candidate.tensor_parallel)
        return -replicas * self.server_rate(candidate)
