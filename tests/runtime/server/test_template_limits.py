# SPDX-License-Identifier: Apache-2.0
"""A chat template has a bounded time and output, whatever a request makes it read."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_trt.api.chat_template import render_chat
from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.request import tokenizing
from dflash_trt.runtime.server.request.tokenizing import limited_template
from tests.paths import FIXTURES
from tests.runtime.server.live import Live

MESSAGES = [{"role": "user", "content": "x" * 1000}] * 20
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SLOW = "{% for i in range(1500) %}{% for j in range(1500) %}{% endfor %}{% endfor %}"
"""Takes a second without a limit, and writes nothing."""


@pytest.fixture(scope="module")
def render() -> Callable[[str], str]:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(FIXTURES / "tiny-gpt-oss")
    return lambda template: render_chat(tokenizer, MESSAGES, chat_template=template)


def test_a_template_within_its_limits_writes_what_it_does_without(render: Callable[[str], str]) -> None:
    with limited_template(60, 10**6):
        limited = render(PLAIN)
    assert limited == render(PLAIN)
    with limited_template(60, len(limited)):
        render(PLAIN)
    with (
        pytest.raises(RequestError, match="messages: the chat template writes more than"),
        limited_template(60, len(limited) - 1),
    ):
        render(PLAIN)


@pytest.mark.parametrize(
    "template",
    [
        SLOW,
        "{% macro f() %}" + SLOW + "{% endmacro %}{{ f() }}",
        "{% set ns = namespace(x=0) %}{% for i in range(90000) %}{% set ns.x = ns.x + 1 %}{% endfor %}" * 5,
        "{% for i in range(90000) %}{{ messages | map(attribute='content') | list | length }}{% endfor %}",
        PLAIN + SLOW + "{{ raise_exception('never reached') }}",
    ],
)
def test_a_slow_template_ends(render: Callable[[str], str], template: str) -> None:
    """The search for the message that fails, of which the last would need five more renderings, has the same limit."""
    trace = sys.gettrace()
    with (
        pytest.raises(RequestError, match=r"messages: the chat template takes more than 0\.02 s"),
        limited_template(0.02, 10**9),
    ):
        render(template)
    assert sys.gettrace() is trace


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ messages | tojson }}{% endfor %}",
        "{% macro f(m) %}{{ m.content }}{% endmacro %}{% for m in messages * 20 %}{{ f(m) }}{% endfor %}",
    ],
)
def test_the_output_ends(render: Callable[[str], str], template: str) -> None:
    with (
        pytest.raises(RequestError, match="messages: the chat template writes more than 100000 characters"),
        limited_template(60, 100_000),
    ):
        render(template)


def test_a_template_that_fails_is_reported_as_without_limits(render: Callable[[str], str]) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]: .*TemplateError: no"), limited_template(60, 10**6):
        render("{{ raise_exception('no') }}")


def test_the_server_limits_templates(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "TEMPLATE_SECONDS", 0.0)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, options in (("/v1/chat/completions", {"max_tokens": 1}), ("/tokenize", {})):
        response = live.post(path, **chat, **options)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "messages: the chat template takes more than 0 s"
    assert live.complete(prompt="x", max_tokens=1)
