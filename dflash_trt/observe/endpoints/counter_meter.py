# SPDX-License-Identifier: Apache-2.0
"""Acceptance from the Prometheus counters of a runtime, by difference."""

from __future__ import annotations

import time

from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.counter_growth import acceptance_of, grown
from dflash_trt.observe.endpoints.counter_names import CounterNames
from dflash_trt.observe.endpoints.meter import Meter
from dflash_trt.observe.endpoints.metrics_page import MetricsPage, read_page
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance

IDLE_SECONDS = 10.0  # for counters that are updated after the last answer, and for abandoned requests


class CounterMeter(Meter):
    """Growth of the counters; where they do not grow, samples of a gauge while requests run, if there is one."""

    def __init__(self, client: Client, names: CounterNames) -> None:
        self._client, self._names = client, names
        self._before: MetricsPage | None = None
        self._samples: list[float] = []
        self.sample_seconds = 1.0 if names.sampled_tau else None

    def begin(self) -> None:
        self._before = self._read_idle()

    def sample(self) -> None:
        """The gauge of the average over the last log interval, which counts the bonus token, too."""
        page = self._read()
        if page.total(self._names.running):
            self._samples += [value for _, value in page.samples.get(self._names.sampled_tau, ()) if value > 0]

    def end(self) -> ObservedAcceptance:
        assert self._before is not None
        names = self._names
        growth = grown(self._before, self._read_idle(), names.drafts)
        for name in names.drafts:
            growth.count(name)  # whole numbers, of which nothing is rounded away
        counts, output = acceptance_of(growth, names), growth.count(names.output_tokens)
        if counts.drafting_passes or (growth.has(names.passes) and not names.sampled_tau):
            return ObservedAcceptance(source="counters", how=names.how, counts=counts, output_tokens=output)
        if not names.sampled_tau:
            why = f"{names.passes} did not grow: no drafts, or a release without it"
            return ObservedAcceptance(source="not published", how=why, output_tokens=output)
        if not self._samples:
            why = f"{names.passes} did not grow, and {names.sampled_tau} had no value meanwhile"
            return ObservedAcceptance(source="not published", how=why, output_tokens=output)
        return ObservedAcceptance(
            source="gauges",
            how=f"mean of {len(self._samples)} samples of {names.sampled_tau}, which counts the bonus token",
            sampled_tau=sum(self._samples) / len(self._samples),
            output_tokens=output,
        )

    def _read(self) -> MetricsPage:
        return read_page(self._client, self._names.path)

    def _read_idle(self) -> MetricsPage:
        """The page once no request runs or waits, as each is counted at its end."""
        deadline = time.monotonic() + IDLE_SECONDS
        page = self._read()
        while any(map(page.total, (self._names.running, self._names.waiting))) and time.monotonic() < deadline:
            time.sleep(0.05)
            page = self._read()
        return page
