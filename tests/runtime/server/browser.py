# SPDX-License-Identifier: Apache-2.0
"""A real Chromium; skips, with the command that installs it, where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


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
