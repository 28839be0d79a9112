# SPDX-License-Identifier: Apache-2.0
"""Acceptance from TensorRT-LLM's statistics of iterations, which GET /metrics hands out once (enable_iter_perf_stats).

Names are those of SpecDecodingStats in executor/types.h.
"""

from __future__ import annotations

import msgspec

from dflash_trt.api.acceptance import Count
from dflash_trt.errors import EndpointError
from dflash_trt.files.json_file import json_document
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.meter import Meter
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting

HOW = "specDecodingStats of iterations: drafting passes = numRequestsWithDraftTokens, numDraftTokens, numAcceptedTokens"


class _DraftCounts(msgspec.Struct, frozen=True, rename="camel"):
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    num_requests_with_draft_tokens: Count = 0


class _Iteration(msgspec.Struct, frozen=True, rename="camel"):
    iter: int | None = None
    attention_dp_rank: int | None = 0
    """Ranks of attention data parallelism repeat what rank 0 says."""
    spec_decoding_stats: _DraftCounts | None = None


class IterationMeter(Meter):
    """The sum over iterations, and whether all were seen."""

    sample_seconds = 0.5

    def __init__(self, client: Client) -> None:
        self._client, self._where = client, f"{client.url}/metrics"
        self._reset()

    def _reset(self) -> None:
        self._counts = drafting(0, 0, 0)
        self._num_iterations = self._num_lost = 0
        self._last: int | None = None

    def begin(self) -> None:
        self.sample()
        self._reset()

    def sample(self) -> None:
        rows = json_document(self._client.get("/metrics"), self._where, EndpointError, finite=False)
        if isinstance(rows, list):  # some releases send each as a text
            rows = [self._document(row) if isinstance(row, str) else row for row in rows]
        try:
            iterations = msgspec.convert(rows, list[_Iteration])
        except msgspec.ValidationError as error:
            raise EndpointError(f"{self._where}: expected a list of iterations, found {error}") from None
        for iteration in iterations:
            if not iteration.attention_dp_rank:
                self._add(iteration)

    def _document(self, text: str) -> object:
        return json_document(text.encode(), self._where, EndpointError, finite=False)

    def _add(self, iteration: _Iteration) -> None:
        self._num_iterations += 1
        if iteration.iter is not None:
            if self._last is not None:
                self._num_lost += max(0, iteration.iter - self._last - 1)
            self._last = iteration.iter
        stats = iteration.spec_decoding_stats
        if stats is not None and stats.num_draft_tokens:
            self._counts += drafting(
                stats.num_requests_with_draft_tokens, stats.num_accepted_tokens, stats.num_draft_tokens
            )

    def end(self) -> ObservedAcceptance:
        self.sample()
        if not self._num_iterations:
            why = "GET /metrics lists no iterations: set enable_iter_perf_stats (or return_perf_metrics)"
            return ObservedAcceptance(source="not published", how=why)
        if not self._counts.drafting_passes:
            return ObservedAcceptance(source="not published", how="no iteration had specDecodingStats: no drafts")
        if not self._num_lost:
            return ObservedAcceptance(source="counters", how=HOW, counts=self._counts)
        how = f"{HOW}, without {self._num_lost} iterations that were dropped or taken by another client"
        return ObservedAcceptance(source="gauges", how=how, sampled_tau=self._counts.tau_of_drafting_passes)
