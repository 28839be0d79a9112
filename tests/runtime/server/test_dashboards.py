# SPDX-License-Identifier: Apache-2.0
"""What the dashboard of this server asks for is on its page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.server.live import Live
from tests.tools.dashboards.queries import expressions, metrics, selectors


def test_every_metric_and_label_is_on_the_page(live: Live) -> None:
    live.complete(prompt="def f(", max_tokens=9, temperature=0)
    page: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(live.http.get("/metrics").text):
        for sample in family.samples:
            page.setdefault(sample.name, set()).update(sample.labels)
    assert metrics("dflash_trt") - set(page) == set()
    for expression in expressions("dflash_trt"):
        for selector in selectors(expression):
            asked = {matcher.name for matcher in selector.matchers.matchers} - {"instance"}  # Prometheus's own label
            assert asked <= page[selector.name], expression
