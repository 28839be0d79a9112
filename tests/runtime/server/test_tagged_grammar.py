# SPDX-License-Identifier: Apache-2.0
"""Calls that are required or strict match their schemas in every format, and what a format cannot write is refused."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError
from dflash_trt.runtime.grammars.compiler import GrammarCompiler
from dflash_trt.runtime.server.calls.hermes import HermesParser
from dflash_trt.runtime.server.calls.tagged_calls import call_reader
from dflash_trt.runtime.server.calls.tools import call_grammar, read_tools, tool_format
from dflash_trt.runtime.server.request.request_fields import ChatBody
from tests.paths import FIXTURES
from tests.runtime.grammars.sampler import sample

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "°F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9}, "where": {"$ref": "#/$defs/Place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
}  # fmt: skip
STRICT = {"type": "function", "function": {"name": "get", "parameters": SCHEMA, "strict": True}}
LOOSE = {"type": "function", "function": {"name": "get_all", "parameters": SCHEMA}}
TEMPLATES = {"hermes": "<tool_call>", "qwen3-coder": "<tool_call><function=", "glm": "<tool_call><arg_key>"}
ARGUMENTS = {"city": "St. <b>", "unit": "°F", "days": 3, "where": [1, 2]}


def tokenizer(form: str, tokens: list[str]) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(FIXTURES / "tiny-qwen3")
    loaded.chat_template = TEMPLATES[form]
    loaded.add_tokens(tokens)
    return loaded


def grammar(form: Any, definitions: list[dict[str, Any]], choice: Any = "auto", *, parallel: bool = True) -> Grammar:
    body = ChatBody(messages=[], tools=definitions, tool_choice=choice, parallel_tool_calls=parallel)
    tools = read_tools(body)
    assert tools is not None
    found = call_grammar(tools, form)
    assert found is not None
    return found


def is_taken(tokenizer: PreTrainedTokenizerBase, grammar: Grammar, token_ids: list[int]) -> bool:
    """Whether an answer of these tokens may end."""
    guided = GrammarCompiler(tokenizer, len(tokenizer), {0}).processor(grammar)
    logits = np.zeros((len(token_ids) + 1, len(tokenizer)), dtype=np.float32)
    guided.process(logits, token_ids)
    return all(np.isfinite(row[token]) for row, token in zip(logits, [*token_ids, 0], strict=True))


def call(form: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as the templates write it."""
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    if form == "qwen3-coder":
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
    if form == "glm":
        inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
        return f"<tool_call>{name}\n{inner}</tool_call>"
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("tokens", [[], ["<tool_call>", "</tool_call>", "<think>", "</think>"]], ids=["text", "tokens"])
def test_strict_calls_among_text(form: str, tokens: list[str]) -> None:
    loaded = tokenizer(form, tokens)
    strict = grammar(tool_format(loaded), [STRICT, LOOSE])

    def takes(text: str) -> bool:
        return is_taken(loaded, strict, list(loaded(text)["input_ids"]))

    good = call(form, "get", ARGUMENTS)
    other = call(form, "get_all", {"anything": "x"})
    for text in ("Hm < tool.", good, f"<think>a</think>I look.\n{good}", f"{good}\n{other}{good} so", other):
        assert takes(text), text
    wrong: list[dict[str, Any]] = [
        {"city": "a"}, {"city": "a", "days": 0}, {**ARGUMENTS, "unit": "K"}, {**ARGUMENTS, "more": 1},
        {**ARGUMENTS, "where": [3]}, {**ARGUMENTS, "city": "</tool_call>"} if form != "hermes" else {},
    ]  # fmt: skip
    for arguments in wrong:
        assert not takes(call(form, "get", arguments)), arguments
    for text in ("<tool_call>", "a <tool_call>x</tool_call>", call(form, "set", {}), good[:-3]):
        assert not takes(text), text
    assert takes(call(form, "get", {"city": "a", "days": 1}))
    letters = [token for letter in call(form, "get", {"city": "a"}) for token in loaded(letter)["input_ids"]]
    assert not is_taken(loaded, strict, letters), "a call that is spelled is no free text"
    alone = grammar(tool_format(loaded), [STRICT], parallel=False)
    assert is_taken(loaded, alone, list(loaded(good)["input_ids"]))
    assert not is_taken(loaded, alone, list(loaded(good + good)["input_ids"]))


@pytest.mark.parametrize("form", ["qwen3-coder", "glm"])
def test_required_calls_satisfy_their_schema(form: Any) -> None:
    """Random answers; without free text, which would hardly ever end."""
    properties = {key: value for key, value in SCHEMA["properties"].items() if key != "city"}
    schema = {**SCHEMA, "properties": properties, "required": ["where"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("get", "get_all")]
    required, random = grammar(form, tools, "required"), Random(2)
    texts = [text for text in (sample(required, random) for _ in range(24)) if text is not None]
    assert len(texts) > 12
    for text in texts:
        content, calls = HermesParser(call_reader(form, tools)).push(text, is_last=True)
        assert (content, bool(calls)) == ("", True), text
        for each in calls:
            assert each.name in ("get", "get_all")
            jsonschema.validate(json.loads(each.arguments), schema)


@pytest.mark.parametrize("form", TEMPLATES)
def test_many_tools(form: Any) -> None:
    """Their grammar is longer than they are, up to a limit on themselves."""
    tools = [{**STRICT, "function": {**STRICT["function"], "name": f"get_{i}"}} for i in range(128)]  # type: ignore[dict-item]
    loaded = tokenizer(form, [])
    assert is_taken(loaded, grammar(form, tools), list(loaded(call(form, "get_127", ARGUMENTS))["input_ids"]))
    long = {"type": "function", "function": {**LOOSE["function"], "strict": True, "description": "x" * 2**16}}  # type: ignore[dict-item]
    with pytest.raises(RequestError, match=r"tools: \d+ characters to be enforced are more than 65536"):
        grammar(form, [long])


def test_nothing_is_enforced_unless_it_is_asked_for() -> None:
    tools = read_tools(ChatBody(messages=[], tools=[LOOSE]))
    assert tools is not None
    assert call_grammar(tools, "hermes") is None


@pytest.mark.parametrize("form", TEMPLATES)
def test_json_texts_may_have_the_tags_in_them(form: str) -> None:
    """Spelled, where they are tokens."""
    loaded = tokenizer(form, ["<tool_call>", "</tool_call>"])
    properties = {"o": {"type": "array", "items": {"type": "string"}}}
    function = {"name": "f", "parameters": {"properties": properties, "additionalProperties": False}, "strict": True}
    text = call(form, "f", {"o": ["a</MARK</parameter></arg_value>"]})
    before, after = (loaded(part)["input_ids"] for part in text.split("MARK"))
    middle = [token for letter in "tool_call>" for token in loaded(letter)["input_ids"]]
    strict = grammar(tool_format(loaded), [{"type": "function", "function": function}])
    assert is_taken(loaded, strict, [*before, *middle, *after])


HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]


def test_strict_calls_in_harmony() -> None:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(FIXTURES / "tiny-gpt-oss")
    loaded.add_special_tokens({"additional_special_tokens": HARMONY})
    strict = grammar(tool_format(loaded), [STRICT, LOOSE])
    begin = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    called = "<|channel|>commentary to=functions.get json<|message|>"
    final = "<|channel|>final<|message|>Yes."
    constrained = called.replace("json", "<|constrain|>json")
    whole = json.dumps(ARGUMENTS, ensure_ascii=False)

    def takes(text: str) -> bool:
        return is_taken(loaded, strict, list(loaded(text)["input_ids"]))

    for text in ("Yes.", final, begin + final, begin + called + whole, called + whole, begin + constrained + whole):
        assert takes(text), text
    for text in (begin, called + '{"city": "a"}', begin + called.replace("get", "set") + whole, called):
        assert not takes(text), text


@pytest.mark.parametrize(
    ("schema", "message"),
    [({"properties": {"a": {"type": "string", "pattern": "x"}}}, "/properties/a/pattern cannot be enforced in the fo"),
     ({"properties": {"a>": {}}}, "/properties/a> cannot be written in the format of glm"),
     ({"minProperties": 1}, "/minProperties cannot be enforced in the format of glm"),
     ({"properties": 5}, "/properties is no object"), ({"required": "a"}, "/properties is no object or /required no"),
     ({"properties": {"a": {"type": "string", "enum": [1]}}}, "/properties/a has no texts that can be written"),
     ({"properties": {"a": {"type": "string", "const": "</tool_call>"}}}, "/properties/a has no texts"),
     ({"properties": {"a": {"not": {}}}}, "/properties/a: /not cannot be enforced")],
    ids=str,
)  # fmt: skip
def test_what_a_format_cannot_write_is_refused(schema: dict[str, Any], message: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(RequestError) as refusal:
        sample(grammar("glm", [tool]), Random(0))
    assert refusal.value.message.startswith(f"tools: parameters of f: {message}"), refusal.value.message
