# SPDX-License-Identifier: Apache-2.0
"""Structured outputs match the schema, regular expression or grammar of their request, or are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pydantic
import pytest
from openai import BadRequestError

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.request.grammar_fields import read_grammar
from dflash_trt.runtime.server.request.request_fields import StructuredOutputs
from tests.runtime.server.live import MODEL, Live

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["class", "def"]}, "size": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
CHOICES = ['say "no"', "back\\slash", "line\nbreak", "[a-z]*", "é€😀", "\x00"]
MESSAGES: Any = [{"role": "user", "content": "x"}]
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "schema"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "schema"),
    ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, "[0-9]{3}-[a-z]{2}"),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "a|b"),
    ({"structured_outputs": {"grammar": 'start: A " " A\nA: /[ab]/'}}, "[ab] [ab]"),
    ({"structured_outputs": {"choice": CHOICES}}, "|".join(map(re.escape, CHOICES))),
    ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "<x>"}}}, "<x>"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "pattern"), FIELDS, ids=lambda value: str(value)[:40])
def test_answers_match(live: Live, fields: dict[str, Any], pattern: str) -> None:
    settings = {"prompt": "def f(", "max_tokens": 200, "seed": 5, **fields}
    whole = live.complete(**settings)["choices"][0]
    assert whole["finish_reason"] == "stop"
    if pattern == "schema":
        jsonschema.validate(json.loads(whole["text"]), SCHEMA)
    else:
        assert re.fullmatch(pattern, whole["text"])
    streamed = "".join(event["choices"][0]["text"] for event in live.events(**settings))
    plain = live.complete(draft_length=0, **settings)["choices"][0]["text"]
    assert whole["text"] == streamed == plain


def test_the_client_parses_its_own_class(live: Live) -> None:
    class Answer(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        is_public: bool

    answer = live.openai().chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Answer, temperature=0, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


def test_a_json_object(live: Live) -> None:
    response = live.post(
        prompt="x", max_tokens=300, seed=4, response_format={"type": "json_object"}, logit_bias={"5": 0}
    )
    choice = response.json()["choices"][0]
    assert choice["text"].startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["text"]), dict)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}},
     "response_format: /properties/a/not cannot be enforced"),
    ({"structured_outputs": {"json": {"$ref": "https://example.org/schema"}}},
     "structured_outputs: /$ref points into another document"),
    ({"structured_outputs": {"regex": r"\Aab\Z"}}, "structured_outputs: the anchor \\A in a regular expression"),
    ({"structured_outputs": {"regex": "(?=a)a"}}, "the lookahead (?= in a regular expression"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=str)
def test_what_cannot_be_enforced_is_named(live: Live, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError) as refusal:
        live.openai().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, extra_body=fields)
    assert message in refusal.value.message


@pytest.mark.parametrize(
    "fields",
    [{"regex": "a?" * 2048}, {"regex": "((a{1,99}){1,99}){1,99}"}, {"grammar": "root ::= " + '"a"? ' * 1600},
     {"json": {"allOf": [{"pattern": f"a[ab]{{{i}}}"} for i in range(30)]}},
     {"json": {"properties": {f"k{i}": {} for i in range(4000)}}},
     {"json": {"properties": {"a": {"patternProperties": {f"^{i}x": {} for i in range(999)}}}}}],
    ids=lambda fields: str(fields)[:40],
)  # fmt: skip
def test_hostile_grammars_end(live: Live, fields: dict[str, Any]) -> None:
    """With 400 before they start, or with an error when one token takes too much work; the decoder goes on."""
    for seed in range(2):
        response = live.post(prompt="x", max_tokens=64, temperature=1, seed=seed, structured_outputs=fields)
        assert response.status_code in (200, 400), response.text
    assert live.complete(prompt="x", max_tokens=1)["choices"][0]["finish_reason"] == "length"


def test_ignored_end_tokens() -> None:
    with pytest.raises(RequestError, match="ignore_eos: expected False"):
        SamplingParams(structured_outputs=read_grammar(None, StructuredOutputs(regex="a")), ignore_eos=True)
