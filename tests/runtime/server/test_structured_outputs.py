# SPDX-License-Identifier: Apache-2.0
"""response_format and structured_outputs, whole and streamed."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pydantic
import pytest

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.grammars import bounded, read_grammar
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
    ({"structured_outputs": {"json": SCHEMA}}, "schema"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "schema"),
    ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, "[0-9]{3}-[a-z]{2}"),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "a|b"),
    ({"structured_outputs": {"choice": CHOICES}}, "|".join(map(re.escape, CHOICES))),
    *(({"structured_outputs": {"choice": [text]}}, re.escape(text)) for text in CHOICES),
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


def test_limits_leave_room_for_honest_grammars() -> None:
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        nested = {"type": "object", "properties": {"a": nested}}
    assert read_grammar({"structured_outputs": {"json": nested}}) is not None
    for _ in range(400):
        nested = {"type": "object", "properties": {"a": nested}}
    for fields in ({"structured_outputs": {"json": nested}}, {"structured_outputs": {"regex": "(" * 17}}):
        with pytest.raises(RequestError, match="of brackets"):
            read_grammar(fields)
    with pytest.raises(RequestError, match="ignore_eos: expected False"):
        SamplingParams(
            structured_outputs=bounded(read_grammar({"structured_outputs": {"regex": "a"}})), ignore_eos=True
        )  # type: ignore[arg-type]
