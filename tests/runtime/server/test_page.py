# SPDX-License-Identifier: Apache-2.0
"""The page in a real Chromium: both columns end with the same text, bands add up, and nothing is wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.live import Live
from tests.waiting import PATIENCE, until


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

    def has_ended() -> bool:
        assert not text_of(window, "#error")
        return not window.find_element("id", "start").get_property("disabled") and bool(text_of(window, "#verdict"))

    until(has_ended)
    return text_of(window, "#verdict")


@pytest.fixture
def window(live: Live) -> Iterator[Any]:
    """The page after the comparison that it begins with."""
    with chromium() as opened:
        opened.get(live.url)
        assert "same text" in verdict(opened)
        yield opened


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_both_columns_end_with_the_same_text(live: Live, window: Any, temperature: str) -> None:
    field = window.find_element("id", "temperature")
    field.clear()
    field.send_keys(temperature)
    before = live.llm.metrics()
    window.find_element("id", "start").click()
    judged = verdict(window)
    after = live.llm.metrics()
    plain, dflash = text_of(window, "#plain .text"), text_of(window, "#dflash .text")
    assert re.match(
        r"(Faster|Slower|About as fast|This machine is too busy to tell|\d+ pairs are too few to compare speeds).*; "
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
    answers, rest = divmod(after.output_tokens - before.output_tokens, 2 * tokens)
    assert (answers >= 2, rest) == (True, 0)  # a warm-up and pairs
    assert float(text_of(window, '#dflash [data-figure="tau"]')) == pytest.approx((tokens - 1) / passes, abs=0.01)
    assert window.get_log("browser") == []


def test_a_grammar_shows_what_it_does_to_acceptance(window: Any) -> None:
    window.find_element("id", "regex").send_keys("[a-c]{60}")
    window.find_element("id", "start").click()
    assert "same text" in verdict(window)
    assert re.fullmatch(r"def main\([a-c]{60}", text_of(window, "#dflash .text"))
    assert float(text_of(window, '#dflash [data-figure="tau"]')) >= 1


def test_the_steps_can_be_replayed_by_keyboard(window: Any) -> None:
    scrubber = window.find_element("id", "scrubber")
    scrubber.send_keys("\ue014")  # arrow right
    assert text_of(window, "#position").startswith("pass 2 of ")
    assert len(window.find_elements("css selector", ".step.chosen")) == 1
    assert text_of(window, '[data-stage="accept"] .tokens')
    assert window.find_elements("css selector", "#bars .bar")
    window.find_element("id", "show-rejected").send_keys(" ")
    assert window.execute_script("return getComputedStyle(document.querySelector('.rejected')).display") == "inline"
    assert window.get_log("browser") == []


# Elements whose own text has a contrast below 4.5 (WCAG 2.2, 1.4.3), disabled controls left out.
FAINT = """
const rgb = (color) => color.match(/[\\d.]+/g).map(Number);
const luminance = (color) => rgb(color).slice(0, 3).map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const ground = (node) => {
  const color = getComputedStyle(node).backgroundColor;
  return rgb(color)[3] === 0 ? ground(node.parentElement) : color;
};
return [...document.querySelectorAll("body *")].filter((node) => {
  const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  if (!hasText || !node.checkVisibility() || node.disabled) return false;
  const [a, b] = [luminance(getComputedStyle(node).color), luminance(ground(node))].sort((x, y) => x - y);
  return (b + 0.05) / (a + 0.05) < 4.5;
}).map((node) => node.outerHTML.slice(0, 80));
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen(window: Any, scheme: str) -> None:
    set_colours(window, scheme)
    ground = window.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    for tab in ("chat", "compare"):
        window.find_element("id", f"tab-{tab}").click()
        for width in (360, 390, 768, 1280, 1920):
            set_size(window, width, 800)
            assert not window.execute_script(WIDER), (tab, width)
        assert window.execute_script(FAINT) == []
        for control in window.find_elements("css selector", "input, textarea, button"):
            assert not control.is_displayed() or control.accessible_name, control.get_attribute("outerHTML")


def test_draft_length_is_a_control(window: Any) -> None:
    assert (text_of(window, "#target"), text_of(window, "#draft")) == (
        "openai/tiny-gpt-oss",
        "z-lab/tiny-gpt-oss-DFlash",
    )
    field = window.find_element("id", "draft-length")
    field.clear()
    field.send_keys("2\n")  # Enter begins
    assert "same text" in verdict(window)
    titles = [band.get_attribute("title") for band in window.find_elements("css selector", ".step")]
    assert "of 2 draft" in titles[0]
    assert not any("of 7 draft" in title for title in titles)


def test_what_was_asked_can_be_asked_again_and_exported(window: Any, tmp_path: Path) -> None:
    field = window.find_element("id", "prompt")
    field.clear()
    field.send_keys("def f(x='it\\'s'")
    window.find_element("id", "start").click()
    verdict(window)
    said = text_of(window, "#dflash .text").removeprefix("def f(x='it\\'s'")
    answer = subprocess.run(text_of(window, "#curl"), shell=True, capture_output=True, check=True, timeout=PATIENCE)
    assert json.loads(answer.stdout)["choices"][0]["text"] == said
    program = [sys.executable, "-c", text_of(window, "#python")]
    printed = subprocess.run(program, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert printed.stdout == said + "\n"
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    window.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    window.find_element("id", "export").click()
    until(lambda: any(tmp_path.glob("dflash-*.json")))
    exported = json.loads(next(tmp_path.glob("dflash-*.json")).read_text())
    assert len(exported["plain"]) == len(exported["dflash"]) >= 1
    for recording in (*exported["plain"], *exported["dflash"]):
        assert "".join(token["text"] for _, step in recording["steps"] for token in step["tokens"]) == said
    assert exported["model"]["draft_model"] == "z-lab/tiny-gpt-oss-DFlash"
    permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    window.execute_cdp_cmd("Browser.grantPermissions", permissions)
    window.find_element("css selector", "[data-copy=curl]").click()
    until(lambda: text_of(window, "#copied") == "copied")
    copied = window.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied.strip() == text_of(window, "#curl").strip()
    assert window.get_log("browser") == []


def test_a_chat_by_keyboard(live: Live, window: Any) -> None:
    window.find_element("id", "tab-compare").send_keys("\ue014")  # arrow right
    assert window.switch_to.active_element.get_attribute("id") == "tab-chat"
    window.find_element("id", "system").send_keys("Be terse.")
    messages = [{"role": "system", "content": "Be terse."}]
    for number, said in enumerate(("one", "two"), start=1):
        window.find_element("id", "message").send_keys(said + "\n")
        until(lambda number=number: len(window.find_elements("css selector", ".turn.assistant")) == number)
        until(lambda: not window.find_element("id", "send").get_property("disabled"))
        messages.append({"role": "user", "content": said})
        body = {"messages": messages, "max_tokens": 124, "temperature": 0}
        answer = live.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
        (*_, shown) = window.find_elements("css selector", ".turn.assistant .said:not(.reasoning)")
        assert shown.get_property("textContent") == answer["content"]
        messages.append({"role": "assistant", "content": answer["content"]})
    (*_, cost) = window.find_elements("css selector", ".turn.assistant .note")
    assert re.search(r"124 tokens, tau \d\.\d\d, \d+ tokens/s", cost.text)
    assert '"role":"system","content":"Be terse."' in text_of(window, "#curl")
    window.find_element("id", "reset").click()
    assert not window.find_elements("css selector", ".turn")
    assert window.get_log("browser") == []


def test_an_error_is_shown(window: Any) -> None:
    window.execute_script("document.getElementById('prompt').value = 'x '.repeat(9000)")
    window.find_element("id", "start").click()
    until(lambda: "max_position_embeddings" in text_of(window, "#error"))


def test_the_description_of_the_api_is_shown(live: Live) -> None:
    with chromium() as window:
        window.get(f"{live.url}/docs")
        until(
            lambda: (
                "POST /v1/chat/completions" in text_of(window, "main")
                and "SpeculativeDecoding" in text_of(window, "main")
            )
        )
        assert not [entry for entry in window.get_log("browser") if entry["level"] == "SEVERE"]
        set_size(window, 390, 800)
        assert not window.execute_script(WIDER)
