# SPDX-License-Identifier: Apache-2.0
"""Long prompts are tokenised within limits, in turns between clients; a template's time and output have limits."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_trt.api.chat_template import render_chat
from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.request import tokenizing
from dflash_trt.runtime.server.request.tokenizing import CHUNK_CHARACTERS, TokenizerPool, limited_template
from tests.paths import FIXTURES
from tests.runtime.server.live import Live, bounded
from tests.waiting import PATIENCE


class CountingTokenizer:
    """The real one, which counts the characters that it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_characters = 0

    def __deepcopy__(self, memo: object) -> CountingTokenizer:
        return self

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_characters += len(text)
        return self._tokenizer(text, **options)

    def get_vocab(self) -> Any:
        return self._tokenizer.get_vocab()


class HeldTokenizer(CountingTokenizer):
    """One whose calls wait until they may go on."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._has_begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, text: str, **options: Any) -> Any:
        self._has_begun.set()
        assert self.may_go_on.wait(PATIENCE)
        return super().__call__(text, **options)

    async def begun(self) -> None:
        """Waits for the first call."""
        while not self._has_begun.is_set():
            await asyncio.sleep(0.001)


def test_a_long_prompt_is_tokenised_up_to_the_limit(live: Live) -> None:
    """One of too many characters not at all."""
    tokenizer = CountingTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 100)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"prompt: \d+ characters are more than 100 tokens"):
        asyncio.run(pool.encode("x" * (pool.max_characters + 1)))
    assert tokenizer.num_characters == 0
    pool = TokenizerPool(tokenizer, 2 * CHUNK_CHARACTERS)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"prompt: it has more than .* tokens"):
        asyncio.run(pool.encode("é1" * 3 * CHUNK_CHARACTERS))
    assert tokenizer.num_characters <= 4 * CHUNK_CHARACTERS
    text = "def f(x): return x + 1\n" * (CHUNK_CHARACTERS // 20)
    assert asyncio.run(pool.encode(text)) == live.llm.backend.encode(text)


@bounded
async def test_clients_take_turns_at_tokenising(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one of ten prompts of one client is tokenised before another client's."""
    monkeypatch.setattr(tokenizing, "FEW_CHARACTERS", 0)
    tokenizer = HeldTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 10**6)  # type: ignore[arg-type]
    many = [asyncio.create_task(pool.encode("x", client="many")) for _ in range(10)]
    await tokenizer.begun()
    few = asyncio.create_task(pool.encode("y", client="few"))
    await asyncio.sleep(0)
    ended: list[asyncio.Task[list[int]]] = []
    for task in (*many, few):
        task.add_done_callback(ended.append)
    tokenizer.may_go_on.set()
    await asyncio.gather(*many, few)
    assert ended.index(few) == 1


@bounded
async def test_a_short_prompt_needs_no_thread_while_none_tokenises(live: Live) -> None:
    """The event loop never waits for a thread, and never tokenises beside one."""
    tokenizer = HeldTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 10**6)  # type: ignore[arg-type]
    longer = asyncio.create_task(pool.encode("x" * (tokenizing.FEW_CHARACTERS + 1), client="a"))
    await tokenizer.begun()
    short = asyncio.create_task(pool.encode("y", client="b"))
    await asyncio.sleep(0.01)
    assert not short.done()
    tokenizer.may_go_on.set()
    assert await short == live.llm.backend.encode("y")
    await longer
    alone = pool.encode("y", client="b")
    with pytest.raises(StopIteration) as ended:
        alone.send(None)  # without a turn of the event loop
    assert ended.value.value == await short


def test_the_tokenizers_time_is_limited(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "TOKENIZER_SECONDS", 0.0)
    tokenizer = CountingTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 10**6)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt: the tokenizer takes more than 0 s"):
        asyncio.run(pool.encode("x " * 2 * CHUNK_CHARACTERS))
    assert tokenizer.num_characters == CHUNK_CHARACTERS, "one chunk"


@bounded
async def test_tokenising_ends_with_the_client(live: Live) -> None:
    tokenizer = HeldTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 10**6)  # type: ignore[arg-type]
    task = asyncio.create_task(pool.encode("x " * 2 * CHUNK_CHARACTERS))
    await tokenizer.begun()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    tokenizer.may_go_on.set()
    last = "x " * CHUNK_CHARACTERS  # on the same thread, so after the first: counted, then tokenised
    await pool.encode(last)
    assert tokenizer.num_characters == CHUNK_CHARACTERS + 2 * len(last)


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
