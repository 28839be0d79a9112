# SPDX-License-Identifier: Apache-2.0
"""The page in a real Chromium: both columns end with the same text, bands add up, and nothing is wrong."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.runtime.server.live import PATIENCE, Live, until


@contextmanager
def chromium(width: int = 1280, height: int = 1500) -> Iterator[Any]:
    """A headless one, driven by selenium."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-proxy-server"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        set_size(window, width, height)
        yield window
    finally:
        window.quit()


def set_size(window: Any, width: int, height: int, *, scale: float = 1.0) -> None:
    """The page's own size, as a phone or a screen has it."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def set_colours(window: Any, scheme: str) -> None:
    """`scheme` is light or dark, as the reader prefers."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


pytestmark = pytest.mark.full
BANDS = """
return [...document.querySelectorAll("#dflash .step")].map((band) => {
  const copy = band.cloneNode(true);
  copy.querySelectorAll(".rejected").forEach((token) => token.remove());
  return copy.textContent;
});
"""
WIDER = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"


def text_of(window: Any, query: str) -> str:
    return str(window.execute_script(f"return document.querySelector('{query}').innerText"))


def verdict(window: Any) -> str:
    """Verdict of the comparison that runs, once it has ended; the page begins one as it opens."""
    deadline = time.monotonic() + PATIENCE
    while window.find_element("id", "start").get_property("disabled") or not text_of(window, "#verdict"):
        assert not text_of(window, "#error")
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return text_of(window, "#verdict")


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_both_columns_end_with_the_same_text(live: Live, temperature: str) -> None:
    with chromium() as window:
        window.get(live.url)
        assert "same text" in verdict(window)
        field = window.find_element("id", "temperature")
        field.clear()
        field.send_keys(temperature)
        before = live.llm.metrics()
        window.find_element("id", "start").click()
        judged = verdict(window)
        after = live.llm.metrics()
        plain, dflash = text_of(window, "#plain .text"), text_of(window, "#dflash .text")
        assert re.match(
            r"(\d+\.\dx faster|As fast as plain decoding here|Slower here, 0\.\d\dx the speed of plain decoding), "
            r"same text: \d+ tokens in",
            judged,
        )
        assert plain == dflash
        bands = window.execute_script(BANDS)
        assert dflash.endswith("".join(bands))
        passes = int(text_of(window, '#dflash [data-figure="passes"]'))
        plain_passes = int(text_of(window, '#plain [data-figure="passes"]'))
        assert len(bands) == passes < plain_passes
        tokens = int(text_of(window, '#dflash [data-figure="tokens"]'))
        assert 6 * tokens == after.output_tokens - before.output_tokens
        assert float(text_of(window, '#dflash [data-figure="tau"]')) == pytest.approx((tokens - 1) / passes, abs=0.01)
        assert window.get_log("browser") == []


def test_a_grammar_shows_what_it_does_to_acceptance(live: Live) -> None:
    with chromium() as window:
        window.get(live.url)
        verdict(window)
        window.find_element("id", "regex").send_keys("[a-c]{60}")
        window.find_element("id", "start").click()
        assert "same text" in verdict(window)
        assert re.fullmatch(r"def main\([a-c]{60}", text_of(window, "#dflash .text"))
        assert float(text_of(window, '#dflash [data-figure="tau"]')) >= 1


def test_the_steps_can_be_replayed_by_keyboard(live: Live) -> None:
    with chromium() as window:
        window.get(live.url)
        verdict(window)
        scrubber = window.find_element("id", "scrubber")
        scrubber.send_keys("\ue014")  # arrow right
        assert text_of(window, "#position").startswith("pass 2 of ")
        assert len(window.find_elements("css selector", ".step.chosen")) == 1
        assert text_of(window, '[data-stage="accept"] .tokens')
        assert window.find_elements("css selector", "#bars .bar")
        window.find_element("id", "show-rejected").send_keys(" ")
        assert window.execute_script("return getComputedStyle(document.querySelector('.rejected')).display") == "inline"
        assert window.get_log("browser") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_every_screen(live: Live, scheme: str, width: int) -> None:
    with chromium() as window:
        set_size(window, width, 800)
        set_colours(window, scheme)
        window.get(live.url)
        verdict(window)
        assert not window.execute_script(WIDER)
        ground = window.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_an_error_is_shown(live: Live) -> None:
    with chromium() as window:
        window.get(live.url)
        verdict(window)
        window.execute_script("document.getElementById('prompt').value = 'x '.repeat(9000)")
        window.find_element("id", "start").click()
        until(lambda: "max_position_embeddings" in text_of(window, "#error"))
