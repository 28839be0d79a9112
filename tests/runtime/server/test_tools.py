# SPDX-License-Identifier: Apache-2.0
"""Calls of tools by the official client, in Hermes's format and gpt-oss's channels, however an answer is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from openai import BadRequestError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_trt.api.chat_template import encode, render_chat
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.llm import LLM
from dflash_trt.runtime.grammars.compiler import GrammarCompiler
from dflash_trt.runtime.server.calls.channels import Channels, ChannelTokens
from dflash_trt.runtime.server.calls.tools import call_grammar, call_parser, read_tools, tool_format
from dflash_trt.runtime.server.request.messages import read_messages
from dflash_trt.runtime.server.request.request_fields import ChatBody
from tests.engines import trained_engine
from tests.paths import FIXTURES
from tests.runtime.server.conftest import copy_with_template
from tests.runtime.server.live import MODEL, Live, serving

SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "local"]}, "precise": {"type": "boolean"}},
    "required": ["zone", "precise"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_time", "description": "The time.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop_clock"}},
]
MESSAGES: Any = [{"role": "user", "content": "x"}]
SETTINGS: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 120, "seed": 3}
NAMED = {"type": "function", "function": {"name": "get_time"}}


Calls = list[tuple[str, str]]
CALL = '{"name": "f", "arguments": {"a": 1}}'
NESTED = '{"a": {"b": ["}", "\\\\\\"}{"]}, "c": "<tool_call>"}'


TYPES = {"s": {"type": "string"}, "n": {"type": "number"}, "o": {"type": "object"}}
TAGGED_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": TYPES}}}]
VALUES = {"s": "[1,\n 2] <b>", "n": "3", "o": '{"a": "</x>"}', "u": "maybe"}
ARGUMENTS = {"s": "[1,\n 2] <b>", "n": 3, "o": {"a": "</x>"}, "u": "maybe"}
TAGGED = {
    "qwen3-coder": "\n<function=f>\n"
    + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in VALUES.items())
    + "</function>\n",
    "glm": "f\n" + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in VALUES.items()),
}
NO_CALLS = {
    "qwen3-coder": ["x", CALL, "<function=f><parameter=a>1</function>", "<function=f>x</function>"],
    "glm": [CALL, "f <arg_key>a</arg_key>", "f <arg_key>a</arg_key><arg_value>1", "two words"],
}
EMPTY = {"qwen3-coder": "<function=f></function>", "glm": "f"}


def parse_hermes(pieces: list[str], form: Any = "hermes") -> tuple[str, Calls, bool]:
    """Content, (name, arguments) of each call, and whether the last is open."""
    parser, content, calls = call_parser(form, TAGGED_TOOLS), "", []
    for i, piece in enumerate(pieces):
        added, deltas = parser.push(piece, is_last=i == len(pieces) - 1)
        content += added
        for delta in deltas:
            if delta.name is not None:
                calls.append((delta.name, ""))
            assert delta.name is not None or delta.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return content, calls, parser.has_open_call


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("form", TAGGED)
def test_tagged_arguments_have_the_types_of_their_schema(form: str) -> None:
    """An argument that the schema does not know is read as JSON, or kept as text."""
    for size in (1, 7, 10**6):
        text = f"Let me see.\n<tool_call>{TAGGED[form]}</tool_call>\n<tool_call>{EMPTY[form]}</tool_call>"
        content, calls, is_open = parse_hermes(cut(text, size), form)
        assert (content, is_open) == ("Let me see.", False)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", ARGUMENTS), ("f", {})]
    for wrong in NO_CALLS[form]:
        text = f"<tool_call>{wrong}</tool_call>"
        assert parse_hermes([text], form) == (text, [], False)
    assert parse_hermes([f"<tool_call>{TAGGED[form][:20]}"], form)[2]


ENDS = "</parameter></function></arg_value></tool_call><tool_call>"
IN_TEXTS = {
    "hermes": '{"name": "f", "arguments": {"o": ["' + ENDS + '\\""], "s": "x"}}',
    "qwen3-coder": f'<function=f>\n<parameter=o>\n["{ENDS}\\""] \n</parameter>\n<parameter=s>x</parameter></function>',
    "glm": f'f<arg_key>o</arg_key><arg_value>["{ENDS}\\""]</arg_value><arg_key>s</arg_key><arg_value>x</arg_value>',
}


@pytest.mark.parametrize("form", IN_TEXTS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_call_does_not_end_inside_json_texts(form: str, size: int) -> None:
    text = f"a\n<tool_call>{IN_TEXTS[form]}</tool_call>"
    content, calls, is_open = parse_hermes(cut(text * 2, size), form)
    assert (content, is_open) == ("aa", False)
    assert [json.loads(arguments) for _, arguments in calls] == [{"o": [f'{ENDS}"'], "s": "x"}] * 2
    half = text[: text.index("<tool_call>", 8)]
    content, calls, is_open = parse_hermes(cut(half, size), form)
    assert (content, calls, is_open) == (half, [], True)
    content, calls, is_open = parse_hermes(cut(half + text, size), form)
    assert (len(calls), is_open) == (1, False), "a call after one that is none"


@pytest.mark.parametrize(("form", "part"), [("qwen3-coder", "<function=NAME>"), ("glm", "<arg_key>")])
def test_the_format_is_read_from_the_template(form: str, part: str) -> None:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(FIXTURES / "tiny-qwen3")
    tokenizer.chat_template = "{{ '<tool_call>" + part + "' }}"
    assert tool_format(tokenizer) == form


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [("Hi <b> there", "Hi <b> there", []), (f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", '{"a": 1}')]),
     (f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", "Let me see.",
      [("f", '{"a": 1}')] * 2),
     (f"<tool_call>{CALL}", "", [("f", '{"a": 1}')]), (f"x <tool_call>{CALL} x ", f"x <tool_call>{CALL} x ", []),
     ("<tool_call>{x}</tool_call> x", "<tool_call>{x}</tool_call> x", []),
     ("a <tool_call>{", "a <tool_call>{", []), ("a <tool_ca", "a <tool_ca", []), (" \n", " \n", []),
     ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', []),
     ('<tool_call>{"name": "f", "arguments": 5}', '<tool_call>{"name": "f", "arguments": 5}', []),
     ('<tool_call>{"arguments": {"a" :1}, "name": "é"}</tool_call>', "", [("é", '{"a" :1}')]),
     ('<tool_call>{"name": "f"}</tool_call>x', "x", [("f", "{}")]),
     (f'<tool_call>{{"name": "f", "arguments": {NESTED}, "id": 5}}</tool_call> x ', "x", [("f", NESTED)]),
     (f"<tool_call>{CALL}</tool_call> <tool_call>{{x}}</tool_call> a\n", "<tool_call>{x}</tool_call> a",
      [("f", '{"a": 1}')]),
     ("<tool_call>" + "[" * 5000 + "</tool_call>", "<tool_call>" + "[" * 5000 + "</tool_call>", [])],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 5, 10_000])
def test_calls_and_content_of_hermes(text: str, content: str, calls: Calls, size: int) -> None:
    found, found_calls, is_open = parse_hermes(cut(text, size))
    assert (found, found_calls) == (content, calls)
    assert is_open == ("<tool_call>" in text.rpartition("</tool_call>")[2] and not calls)


def test_pieces_of_hermes_change_nothing() -> None:
    """500 texts made of what matters in them."""
    words = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', CALL, '"a": ', '"', "\\", "}", "]", "["]
    words += ["\n", " ", "x", "<", '{"name": ', '{"arguments": {}, "name": "g"}', "</tool", "é"]
    picked = random.Random(0)
    for _ in range(500):
        text = "".join(picked.choices(words, k=picked.randint(1, 16)))
        assert parse_hermes(cut(text, 1)) == parse_hermes(cut(text, picked.randint(2, 9))) == parse_hermes([text]), text


CASES = [
    pytest.param("required", {"max_tokens": 100}, id="required"),
    *(
        pytest.param(choice, limits, id=f"{choice}, {limits}", marks=pytest.mark.full)
        for choice in ("required", NAMED)
        for limits in ({"max_tokens": 300}, {"stop": ["precise"]}, {"stop": ["</tool_call>"]})
    ),
]


@pytest.fixture(scope="module", params=["tiny-gpt-oss", pytest.param("tiny-qwen3", marks=pytest.mark.full)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if request.param == "tiny-gpt-oss":
        yield request.getfixturevalue("shared")
        return
    target = copy_with_template(FIXTURES / request.param, tmp_path_factory.mktemp("target"))
    with LLM(trained_engine(request.param), target, max_batch_size=4, draft_length=7) as llm, serving(llm) as live:
        yield live


@pytest.mark.parametrize(("choice", "limits"), CASES)
def test_deltas_are_the_whole(served: Live, choice: Any, limits: dict[str, Any]) -> None:
    create = served.openai().chat.completions.create
    settings = {**SETTINGS, "tool_choice": choice, "n": 3, **limits}
    calls: list[list[list[str]]] = [[] for _ in range(3)]
    reasons, num_deltas, ids = [""] * 3, 0, set()
    for chunk in create(stream=True, **settings):
        for each in chunk.choices:
            reasons[each.index] = each.finish_reason or reasons[each.index]
            for delta in each.delta.tool_calls or []:
                assert (delta.id is None) == (delta.type is None) == (delta.function.name is None)
                if delta.id is not None:
                    ids.add(delta.id)
                    calls[each.index].append([delta.function.name or "", ""])
                assert delta.index == len(calls[each.index]) - 1
                calls[each.index][-1][1] += delta.function.arguments or ""
                num_deltas += 1
    whole = create(**settings).choices
    shaped = [[[c.function.name, c.function.arguments] for c in each.message.tool_calls or []] for each in whole]
    assert calls == shaped
    assert reasons == [each.finish_reason for each in whole]
    num_calls = sum(map(len, calls))
    assert len(ids) == num_deltas == num_calls
    assert num_calls or "stop" in limits
    if limits.get("stop") == ["precise"]:
        assert "stop" in reasons  # inside the arguments, so nothing is to be called
    else:
        assert set(reasons) <= {"length", "tool_calls"}


HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
ANSWER = (
    "<|channel|>analysis<|message|>They want é code.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
    "<|end|><|start|>assistant<|channel|>final<|message|>def f(): pass<|return|>"
)
REASONING, SAID = "They want é code.", "I look.def f(): pass"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(FIXTURES / "tiny-gpt-oss")
    loaded.add_special_tokens({"additional_special_tokens": HARMONY})
    return loaded


Parsed = tuple[str, str, list[str], bool, int]


def parse(
    tokenizer: PreTrainedTokenizerBase, answer: str | list[int], size: int, stop: tuple[str, ...] = (), *,
    has_tools: bool = False,
) -> Parsed:  # fmt: skip
    """Reasoning, content, names and arguments of calls, whether the last is open, and the reasoning tokens."""
    tokens = ChannelTokens.read(tokenizer)
    channels = Channels(tokens, tokenizer, stop, has_tools=has_tools)
    ids = tokenizer(answer)["input_ids"] if isinstance(answer, str) else answer
    thought, said, calls = "", "", []
    for begin in range(0, len(ids), size):
        reasoning, content, deltas = channels.push(ids[begin : begin + size], is_last=begin + size >= len(ids))
        thought, said = thought + reasoning, said + content
        for delta in deltas:
            calls += [delta.name, ""] if delta.name is not None else []
            calls[-1] += delta.arguments
    return thought, said, calls, channels.has_open_call, channels.num_reasoning_tokens


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_channels_are_told_apart(tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    assert parse(tokenizer, ANSWER, size)[:4] == (REASONING, SAID, [], False)
    stopped = ANSWER[: ANSWER.index(" pass")]  # a stop text ends the channel it is in
    assert parse(tokenizer, stopped, size, ("():",))[:2] == (REASONING, "I look.def f")
    for end in ("They want", "<|end|>", "<|start|>", "assistant", "final", "def"):
        thought, said, *_ = parse(tokenizer, ANSWER[: ANSWER.index(end) + len(end)], size)
        assert REASONING.startswith(thought)
        assert SAID.startswith(said)
        assert "assistant" not in thought + said


def test_without_channels_all_is_said(tokenizer: PreTrainedTokenizerBase) -> None:
    assert parse(tokenizer, "def f(): pass", 2)[:3] == ("", "def f(): pass", [])


def test_other_tokenizers_have_none() -> None:
    assert ChannelTokens.read(AutoTokenizer.from_pretrained(FIXTURES / "tiny-qwen3")) is None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    "header",
    ["<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json",
     "<|start|>assistant to=functions.get_time<|channel|>commentary json"],
)  # fmt: skip
def test_a_message_to_a_function_is_a_call(tokenizer: PreTrainedTokenizerBase, header: str, size: int) -> None:
    text = f'<|channel|>analysis<|message|>Hm.<|end|>{header}<|message|>{{"zone": "é"}}'
    calls = ["get_time", '{"zone": "é"}']
    assert parse(tokenizer, f"{text}<|call|>", size, has_tools=True)[:4] == ("Hm.", "", calls, False)
    cut = ["get_time", '{"zone": "']  # by a stop text, inside arguments
    assert parse(tokenizer, text[:-2], size, ("é",), has_tools=True)[2:4] == (cut, True)


def test_arguments_come_as_they_are_written(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = ChannelTokens.read(tokenizer)
    channels = Channels(tokens, tokenizer, has_tools=True)
    ids = tokenizer('<|channel|>commentary to=functions.get_time json<|message|>{"zone": "utc"}')["input_ids"]
    assert sum(len(channels.push([token], is_last=False)[2]) for token in ids) > 4


def test_pieces_change_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    """100 answers of control tokens, headers and random tokens in any order."""
    control: list[int] = tokenizer.convert_tokens_to_ids(HARMONY)
    texts = ["<|channel|>commentary to=functions.f json<|message|>", "<|channel|>analysis<|message|>", *HARMONY]
    parts: list[list[int]] = [tokenizer(text)["input_ids"] for text in texts]
    picked = random.Random(1)
    for _ in range(100):
        noise = [[picked.randrange(min(control)) for _ in range(picked.randint(1, 12))] for _ in range(8)]
        ids = [token for part in picked.choices(parts + noise, k=picked.randint(1, 6)) for token in part]
        assert len({str(parse(tokenizer, ids, size, has_tools=True)) for size in (1, 2, 5, 1000)}) == 1, ids


@pytest.mark.parametrize(("choice", "parallel"), [("required", True), (NAMED, False)], ids=str)
def test_a_demanded_call(live: Live, choice: Any, parallel: bool) -> None:
    create = live.openai().chat.completions.create
    settings = {**SETTINGS, "tool_choice": choice, "parallel_tool_calls": parallel}
    (whole,) = create(**settings).choices
    assert whole.finish_reason in ("tool_calls", "length")
    calls = whole.message.tool_calls or []
    assert len(calls) == 1 or (parallel and choice == "required" and calls)
    assert not whole.message.content or whole.finish_reason == "length"
    for call in calls if whole.finish_reason == "tool_calls" else calls[:-1]:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA if call.function.name == "get_time" else {})


def test_the_prompt_offers_tools(live: Live) -> None:
    """If none may be called, the answer equals a chat without tools."""
    client = live.openai()
    plain = live.llm.chat(MESSAGES, SamplingParams(max_tokens=8))[0]
    settings = {**SETTINGS, "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(tool_choice="none", **settings)
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (plain.text, None)
    tokenizer = live.llm.backend.tokenizer
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for tools in (TOOLS, strict):  # text that is no call is free
        prompt = render_chat(tokenizer, MESSAGES, tools=tools)
        assert "get_time" in prompt
        expected = live.llm.generate(encode(tokenizer, prompt), SamplingParams(max_tokens=8))[0]
        answer = client.chat.completions.create(**settings | {"tools": tools})
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected.text, "length")


def test_a_conversation_with_calls_and_template_variables(live: Live) -> None:
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "utc"}'}}
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]  # fmt: skip
    tokenizer = live.llm.backend.tokenizer
    text = '# effort: low, thinking\n# user: x\n# assistant: <tool_call>{"name": "get_time", "arguments": '
    text += '{"zone": "utc"}}</tool_call>\n# tool: noon\n# assistant:'
    variables = {"reasoning_effort": "low", "enable_thinking": True}
    assert render_chat(tokenizer, read_messages(messages), template_kwargs=variables) == text
    expected = live.llm.generate(encode(tokenizer, text), SamplingParams(max_tokens=8))[0]
    settings: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
    create = live.openai().chat.completions.create
    assert create(reasoning_effort="low", **settings).choices[0].message.content == expected.text
    kwargs = {"chat_template_kwargs": variables}
    assert create(extra_body=kwargs, **settings).choices[0].message.content == expected.text


def test_a_demanded_call_in_harmony(tokenizer: PreTrainedTokenizerBase) -> None:
    """By the tokens of its control tokens, not by texts that look like them."""
    form = tool_format(tokenizer)
    tools = read_tools(ChatBody(messages=MESSAGES, tools=TOOLS, tool_choice=NAMED))
    (end,) = tokenizer.convert_tokens_to_ids(["<|call|>"])
    guided = GrammarCompiler(tokenizer, len(tokenizer), {end}).processor(call_grammar(tools, form))
    text = '<|channel|>commentary to=functions.get_time json<|message|>{"zone": "utc", "precise": true}<|call|>'
    *called, last = tokenizer(text)["input_ids"]
    assert last == end
    guided.advance(called)
    logits = np.zeros((1, len(tokenizer)), dtype=np.float32)
    guided.process(logits, [])
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == [end]
    spelled = [token for part in ("<|", "channel|>") for token in tokenizer(part)["input_ids"]]
    guided = GrammarCompiler(tokenizer, len(tokenizer), {end}).processor(call_grammar(tools, form))
    logits = np.zeros((len(spelled) + 1, len(tokenizer)), dtype=np.float32)
    guided.process(logits, spelled)
    assert not np.isfinite(logits[0, spelled[0]])


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"tools": {}}, "tools: expected a list"), ({"tools": [{"type": "web_search"}]}, "tools: only functions"),
     ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools: a name has"),
     ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools: parameters of a are no"),
     ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools: strict of a is neither"),
     ({"tools": TOOLS * 65}, "tools: expected at most 128 items, found 130"),
     ({"tool_choice": "required"}, "tool_choice: "),
     ({"tools": TOOLS, "tool_choice": "all"}, "tool_choice: it is none of"),
     ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice: 'x', but"),
     ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format: it cannot be combined"),
     ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls: "), ({"reasoning_effort": "much"}, "one of"),
     ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs: expected variables"),
     ({"chat_template_kwargs": {"messages": "x"}}, "400"), ({"chat_template_kwargs": {"tools": []}}, "found tools"),
     ({"chat_template_kwargs": []}, "chat_template_kwargs: expected an object"),
     ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"anyOf": 5}}}],
       "tool_choice": "required"}, "tools: parameters of a: /anyOf is no schema, but 5"),
     ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "of an object")],
    ids=str,
)  # fmt: skip
def test_what_is_refused(live: Live, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        live.openai().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, extra_body=fields)
