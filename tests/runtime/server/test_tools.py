# SPDX-License-Identifier: Apache-2.0
"""Tools by the official client: demanded calls match their schema, and prompts offer them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from openai import BadRequestError
from transformers import AutoTokenizer

from dflash_trt.api.chat_template import encode, render_chat
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime.logits_processors import GrammarCompiler
from dflash_trt.runtime.server.requests import read_messages
from dflash_trt.runtime.server.tools import call_grammar, read_tools, tool_format
from tests.paths import FIXTURES
from tests.runtime.server.live import MODEL, Live
from tests.runtime.server.test_channels import HARMONY

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
SETTINGS: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, "seed": 3}
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
@pytest.mark.parametrize("parallel", [True, False])
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
    """Unless none may be called; then the answer is that of a chat without."""
    client = live.openai()
    plain = live.llm.chat(MESSAGES, SamplingParams(max_tokens=8))[0]
    settings = {**SETTINGS, "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(tool_choice="none", **settings)
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (plain.text, None)
    tokenizer = live.llm.backend.tokenizer
    prompt = render_chat(tokenizer, MESSAGES, tools=TOOLS)
    assert "get_time" in prompt
    expected = live.llm.generate(encode(tokenizer, prompt, chat=False), SamplingParams(max_tokens=8))[0]
    answer = client.chat.completions.create(**settings)
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
    expected = live.llm.generate(encode(tokenizer, text, chat=False), SamplingParams(max_tokens=8))[0]
    settings: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
    create = live.openai().chat.completions.create
    assert create(reasoning_effort="low", **settings).choices[0].message.content == expected.text
    kwargs = {"chat_template_kwargs": variables}
    assert create(extra_body=kwargs, **settings).choices[0].message.content == expected.text


def test_a_demanded_call_in_harmony() -> None:
    """By the tokens of its control tokens, not by texts that look like them."""
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "tiny-gpt-oss")
    tokenizer.add_special_tokens({"additional_special_tokens": HARMONY})
    form = tool_format(tokenizer)
    assert form is not None
    tools = read_tools({"tools": TOOLS, "tool_choice": NAMED})
    assert tools is not None
    (end,) = tokenizer.convert_tokens_to_ids(["<|call|>"])
    guided = GrammarCompiler(tokenizer, len(tokenizer), {end}).processor(call_grammar(tools, form))
    text = '<|channel|>commentary to=functions.get_time json<|message|>{"zone": "utc", "precise": true}<|call|>'
    guided.advance(tokenizer(text)["input_ids"])
    assert guided._matcher.is_terminated()
    spelled = [token for part in ("<|", "channel|>") for token in tokenizer(part)["input_ids"]]
    guided = GrammarCompiler(tokenizer, len(tokenizer), {end}).processor(call_grammar(tools, form))
    guided.advance(spelled)
    logits = np.zeros((1, len(tokenizer)), dtype=np.float32)
    guided.process(logits, [])
    assert not np.isfinite(logits).any()


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"tools": {}}, "tools: expected a list"), ({"tools": [{"type": "web_search"}]}, "tools: expected"),
     ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools: expected names"),
     ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools: expected parameters"),
     ({"tools": TOOLS * 65}, "tools: expected a list of at most 128"), ({"tool_choice": "required"}, "tool_choice: "),
     ({"tools": TOOLS, "tool_choice": "all"}, "tool_choice: expected"),
     ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice: expected one"),
     ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format: expected none together"),
     ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls: "), ({"reasoning_effort": "much"}, "one of"),
     ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs: expected variables"),
     ({"chat_template_kwargs": {"messages": "x"}}, "400"), ({"chat_template_kwargs": {"tools": []}}, "found tools"),
     ({"chat_template_kwargs": []}, "chat_template_kwargs: expected an object"),
     ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"anyOf": 5}}}],
       "tool_choice": "required"}, "tools: expected a structural_tag that compiles"),
     ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "of an object")],
    ids=str,
)  # fmt: skip
def test_what_is_refused(live: Live, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        live.openai().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, extra_body=fields)
