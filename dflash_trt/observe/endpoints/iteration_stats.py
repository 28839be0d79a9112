# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's statistics of iterations, summed."""

from __future__ import annotations

from dflash_trt.errors import EndpointError, shown
from dflash_trt.files.json_file import json_document
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting

HOW = "specDecodingStats of iterations: drafting passes = numRequestsWithDraftTokens, numDraftTokens, numAcceptedTokens"


class IterationStats:
    """Sums over iterations, and whether all were seen; what ranks of attention data parallelism repeat is left out."""

    def __init__(self) -> None:
        self._num_iterations = self._num_lost = 0
        self._last: int | None = None
        self._passes = self._proposed = self._accepted = 0

    def add(self, content: bytes, where: str) -> None:
        """A page of GET /metrics: a list of objects, or of their texts. Raises EndpointError for what is none."""
        rows = json_document(content, where, EndpointError, what="a list of iterations", finite=False)
        if not isinstance(rows, list):
            raise EndpointError(f"{where}: expected a list of iterations, found {shown(rows)}")
        for row in rows:
            stats = json_document(row.encode(), where, EndpointError, finite=False) if isinstance(row, str) else row
            if not isinstance(stats, dict):
                raise EndpointError(f"{where}: expected an iteration as an object, found {shown(stats)}")
            if stats.get("attentionDpRank", 0) == 0:
                self._num_iterations += 1
                self._follow(stats.get("iter"))
                self._add(stats.get("specDecodingStats") or {}, where)

    def acceptance(self) -> ObservedAcceptance:
        """The sums; not published where no iteration had any."""
        if not self._num_iterations:
            why = "GET /metrics lists no iterations: set enable_iter_perf_stats (or return_perf_metrics)"
            return ObservedAcceptance(source="not published", how=why)
        if not self._passes:
            return ObservedAcceptance(source="not published", how="no iteration had specDecodingStats: no drafts")
        counts = drafting(self._passes, self._accepted, self._proposed)
        if not self._num_lost:
            return ObservedAcceptance(source="counters", how=HOW, counts=counts)
        how = f"{HOW}, without {self._num_lost} iterations that were dropped or that somebody else took"
        return ObservedAcceptance(source="gauges", how=how, sampled_tau=counts.tau_of_drafting_passes)

    def _follow(self, number: object) -> None:
        """Iterations are numbered: a server keeps only so many (iter_stats_max_iterations)."""
        if isinstance(number, int):
            if self._last is not None and number > self._last + 1:
                self._num_lost += number - self._last - 1
            self._last = number

    def _add(self, stats: object, where: str) -> None:
        def count(name: str) -> int:
            value = stats.get(name, 0) if isinstance(stats, dict) else None
            if not isinstance(value, int) or value < 0:
                raise EndpointError(f"{where}: expected specDecodingStats.{name} as a count, found {shown(stats)}")
            return value

        if count("numDraftTokens"):
            self._proposed += count("numDraftTokens")
            self._accepted += count("numAcceptedTokens")
            self._passes += count("numRequestsWithDraftTokens")
