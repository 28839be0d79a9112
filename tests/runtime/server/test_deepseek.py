# SPDX-License-Identifier: Apache-2.0
"""Calls in the format of DeepSeek's templates: read from the template, parsed however they are cut, and enforced."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_trt.api.chat_template import render_chat
from dflash_trt.errors import RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime.server.calls.deepseek import DeepSeekFormat
from dflash_trt.runtime.server.calls.tools import tool_format
from dflash_trt.runtime.server.request.generation_request import parse_request
from dflash_trt.runtime.server.request.messages import read_messages
from dflash_trt.runtime.server.request.tokenizing import TokenizerPool
from tests.engines import trained_engine
from tests.paths import FIXTURES
from tests.runtime.grammars.sampler import sample
from tests.runtime.server.conftest import copy_with_template
from tests.runtime.server.live import serving
from tests.runtime.server.test_tagged_grammar import LOOSE, SCHEMA, STRICT, grammar, is_taken
from tests.runtime.server.test_tools import NAMED, SETTINGS, cut, parse_hermes
from tests.runtime.server.test_tools import SCHEMA as TIME

CALLS, CALLS_END, CALL, CALL_END, SEP = TAGS = [
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}" + CALLS + "{% for t in m.tool_calls %}"
    "CALL{% endfor %}" + CALLS_END + "{% endif %}{% endfor %}"
)
WRITTEN = {
    "v3.1": CALL + "{{ t.function.name }}" + SEP + "{{ ARGUMENTS }}" + CALL_END,
    "v3": "{% if not loop.first %}{{ '\\n' }}{% endif %}" + CALL + "{{ t.type }}" + SEP + "{{ t.function.name }}"
    "{{ '\\n```json\\n' + ARGUMENTS + '\\n```' }}" + CALL_END,
}  # fmt: skip
ARGUMENTS = ["'' + t.function.arguments", "t.function.arguments|tojson"]
FORMS = {name: DeepSeekFormat(is_fenced=name == "v3", has_text_arguments=True) for name in WRITTEN}
GIVEN = '{"a": "é\\n```' + CALL_END + '", "b": [1]}'


def tokenizer(form: str, arguments: str = ARGUMENTS[0], *, has_tokens: bool = True) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(FIXTURES / "tiny-qwen3")
    loaded.chat_template = TEMPLATE.replace("CALL{%", WRITTEN[form].replace("ARGUMENTS", arguments) + "{%")
    if has_tokens:
        loaded.add_tokens(TAGS)
    return loaded


def call(form: str, name: str, arguments: str) -> str:
    if form == "v3":
        return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"
    return f"{CALL}{name}{SEP}{arguments}{CALL_END}"


def section(form: str, *calls: str) -> str:
    return CALLS + ("\n" if form == "v3" else "").join(calls) + CALLS_END


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_the_format_is_read_from_the_template(form: str, arguments: str) -> None:
    """With how it takes the arguments of a conversation, in which calls stand as they were written."""
    loaded = tokenizer(form, arguments)
    read = tool_format(loaded)
    assert read == DeepSeekFormat(is_fenced=form == "v3", has_text_arguments=arguments == ARGUMENTS[0])
    function = {"name": "f", "arguments": '{"a": 1}'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    messages = read_messages([{"role": "user", "content": "x"}, message], read)
    written = render_chat(loaded, messages, add_generation_prompt=False)
    assert written == "x" + section(form, call(form, "f", '{"a": 1}'))


def test_other_formats_are_refused() -> None:
    loaded = tokenizer("v3.1")
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [LOOSE]}
    for template, message in (
        (str(loaded.chat_template).replace(SEP, ":"), "tools: the target's chat template writes calls in none"),
        ("<｜DSML｜invoke", "tools: calls in DSML, the format of DeepSeek-V3.2 and V4, are not supported"),
    ):
        loaded.chat_template = template
        with pytest.raises(RequestError, match=message):
            parse_request(chat, "m", 100, tool_format(loaded), is_chat=True)
    hidden = tokenizer("v3.1", has_tokens=False)
    hidden.add_special_tokens({"additional_special_tokens": TAGS})
    assert tool_format(hidden) is None, "its calls would not be seen"


def test_tools_that_the_prompt_does_not_have_are_refused() -> None:
    """DeepSeek's own templates leave them to the system message."""
    pool = TokenizerPool(tokenizer("v3.1"), 1000)
    messages = [{"role": "system", "content": "Tools: get_all"}, {"role": "user", "content": "x"}]
    assert asyncio.run(pool.encode_chat(messages, [LOOSE])) == asyncio.run(pool.encode_chat(messages))
    with pytest.raises(RequestError, match="tools: neither the target's chat template nor a message writes get_all"):
        asyncio.run(pool.encode_chat(messages[1:], [LOOSE]))


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_calls_and_content(form: str, size: int) -> None:
    def parse(text: str) -> tuple[Any, ...]:
        return parse_hermes(cut(text, size), FORMS[form])

    one, two = call(form, "f", GIVEN), call(form, "g", "{}")
    found = [("f", GIVEN), ("g", "{}")]
    assert parse(f"Let me see.\n\n{section(form, one, two)}") == ("Let me see.", found, False)
    assert parse(f"{section(form, one)}\n{section(form, two)} x{CALLS}") == ("x", found, False)
    assert parse(f"{one}{two}{CALLS_END * 3} x ") == ("x", found, False), "the section's tags may be missing"
    assert parse(f"a {CALLS}{one}") == ("a", found[:1], False)
    other = call("v3" if form == "v3.1" else "v3.1", "f", "{}")
    for wrong in (other, call(form, "f g", "{}"), call(form, "f", "[]"), call(form, "f", '{"a"}'), f"{CALL}{CALL_END}",
                  call(form, "f", '{"a": ' * 5000 + "1" + "}" * 5000)):  # fmt: skip
        assert parse(f"a {section(form, wrong)} b ") == (f"a {section(form, wrong)} b ", [], False)
        assert parse(f"{section(form, wrong, one)}")[1] == found[:1]
    assert parse(f"a {CALLS}{one[:-4]}") == (f"a {CALLS}{one[:-4]}", [], True)
    for text in ("a ", f"a {CALLS[:-3]}", f"{CALLS} x", f"{CALL[:-1]} x", f"a{CALLS_END}"):
        assert parse(text) == (text, [], False)


def test_pieces_change_nothing() -> None:
    """300 texts made of what matters in them."""
    picked = Random(0)
    for form in WRITTEN:
        words = [
            *TAGS,
            call(form, "f", "{}"),
            section(form, call(form, "f", GIVEN)),
            "\n",
            " ",
            "x",
            "<",
            "<｜tool▁",
            "{",
        ]
        for _ in range(150):
            text = "".join(picked.choices(words, k=picked.randint(1, 12)))
            parsed = [parse_hermes(cut(text, size), FORMS[form]) for size in (1, picked.randint(2, 9), 10_000)]
            assert parsed[0] == parsed[1] == parsed[2], text


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_strict_calls_among_text(form: str, *, has_tokens: bool) -> None:
    loaded = tokenizer(form, has_tokens=has_tokens)
    read = tool_format(loaded)

    def takes(text: str, choice: str = "auto", *, parallel: bool = True) -> bool:
        strict = grammar(read, [STRICT, LOOSE], choice, parallel=parallel)
        return is_taken(loaded, strict, list(loaded(text)["input_ids"]))

    good = call(form, "get", '{"city": "St. <b>", "days": 3}')
    other = call(form, "get_all", '{"anything": "x"}')
    for text in ("Hm < tool.", f"I look.\n{section(form, good)}", section(form, good, other, good)):
        assert takes(text), text
    wrong = call(form, "get", '{"city": "a", "days": 0}')
    unknown, twice = section(form, call(form, "set", "{}")), section(form, good) * 2
    for text in (section(form, wrong), section(form, good, wrong), wrong, good, CALLS, section(form), unknown, twice):
        assert not takes(f"a {text}"), text
    assert takes(section(form, good), parallel=False)
    assert not takes(section(form, good, good), parallel=False)
    assert takes(section(form, good), choice="required")
    assert not takes(section(form, other), choice="required"), "all schemas are enforced"
    assert not takes("Hm.", choice="required")
    letters = [token for letter in section(form, wrong) for token in loaded(letter)["input_ids"]]
    assert not is_taken(loaded, grammar(read, [STRICT]), letters), "a call that is spelled is no free text"


@pytest.mark.parametrize("form", WRITTEN)
def test_required_calls_satisfy_their_schema(form: str) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get", "get_all")]
    required, random = grammar(FORMS[form], tools, "required"), Random(2)
    texts = [text for text in (sample(required, random) for _ in range(16)) if text is not None]
    assert len(texts) > 8
    for text in texts:
        content, calls, is_open = parse_hermes([text], FORMS[form])
        assert (content, bool(calls), is_open) == ("", True, False), text
        for name, arguments in calls:
            assert name in ("get", "get_all")
            jsonschema.validate(json.loads(arguments), SCHEMA)


@pytest.mark.full
@pytest.mark.parametrize("form", WRITTEN)
def test_calls_of_a_served_target(form: str, tmp_path: Path) -> None:
    """Streamed and whole, and in the conversation that follows."""
    target = copy_with_template(FIXTURES / "tiny-qwen3", tmp_path)
    template = "{{ tools|tojson if tools }}" + str(tokenizer(form).chat_template)
    (target / "chat_template.jinja").write_text(template)
    with LLM(trained_engine("tiny-qwen3"), target, max_batch_size=4, draft_length=7) as llm, serving(llm) as live:
        create = live.openai().chat.completions.create
        settings = {**SETTINGS, "tool_choice": NAMED, "max_tokens": 400}
        (whole,) = create(**settings).choices
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        called = [(each.function.name, each.function.arguments) for each in whole.message.tool_calls]
        ((name, arguments),) = called
        assert name == "get_time"
        jsonschema.validate(json.loads(arguments), TIME)
        deltas = [choice.delta for chunk in create(stream=True, **settings) for choice in chunk.choices]
        streamed = [each.function for delta in deltas for each in delta.tool_calls or []]
        assert [(each.name, each.arguments) for each in streamed] == called
        history = [*SETTINGS["messages"], whole.message.model_dump(exclude_none=True) | {"content": None}]
        results = [{"role": "tool", "tool_call_id": each.id, "content": "noon"} for each in whole.message.tool_calls]
        assert create(**settings | {"messages": history + results, "tool_choice": "auto"}).choices
