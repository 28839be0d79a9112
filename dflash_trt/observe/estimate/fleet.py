# SPDX-License-Identifier: Apache-2.0
"""A way to serve, and the replicas of it that a load needs."""

from __future__ import annotations

import math

import msgspec


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to deploy, at the largest batch that keeps users at their speed."""

    tensor_parallel: int
    expert_parallel: int
    recipe: str
    batch: int
    num_draft_tokens: int
    """Draft length at that batch; 0 disables speculation."""
    user_rate: float
    gpu_rate: float
    limit: str
    """The limit on the batch: "speed", or a `BatchLimit`'s reason."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    num_gpus: int | None = None
    """All available GPUs, on one or more nodes; None: no limit."""
    request_rate: float | None = None
    """Requests per second of all servers together; None: as many as they can serve."""
    output_tokens: int
    """Output tokens of a request."""

    def replicas(self, candidate: Candidate) -> int:
        """Servers of a candidate: enough for the rate, else as many as the GPUs hold; 0 if neither is possible."""
        most = None if self.num_gpus is None else self.num_gpus // candidate.tensor_parallel
        if self.request_rate is None:
            return 1 if most is None else most
        needed = math.ceil(self.request_rate / self.server_rate(candidate))
        return needed if most is None or needed <= most else 0

    def server_rate(self, candidate: Candidate) -> float:
        """Requests a second of one server."""
        return candidate.batch * candidate.user_rate / self.output_tokens

    def price(self, candidate: Candidate) -> float:
        """The objective to minimise: the GPUs needed for the rate, or without a rate the negated throughput of all
        GPUs.
        """
        replicas = self.replicas(candidate)
        if self.request_rate is not None:
            return float(replicas * candidate.tensor_parallel)
        return -replicas * self.server_rate(candidate)
