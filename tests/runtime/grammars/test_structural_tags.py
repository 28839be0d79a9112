# SPDX-License-Identifier: Apache-2.0
"""Each format of a structural tag is enforced, and special tokens in it are tokens."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError
from dflash_trt.runtime.grammars.structural_tags import structural_tag_to_lark
from tests.runtime.grammars.sampler import sample

ONE: dict[str, Any] = {"type": "json_schema", "json_schema": {"const": 1}}
WORD = {"type": "regex", "pattern": "[a-c]{2}"}
TAG = {"type": "tag", "begin": "<f>", "content": ONE, "end": "</f>"}
OTHER = {"type": "tag", "begin": "<g>", "content": WORD, "end": ["</g>", "/>"]}
CALL = r"<f>1(\.0*)?</f>|<g>[a-c]{2}(</g>|/>)"
FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"type": "const_string", "value": 'a "b"'}, 'a "b"'), ({"type": "const_string", "value": ""}, ""),
    (WORD, "[a-c]{2}"),
    ({"type": "grammar", "grammar": 'root ::= "x" | "y"'}, "[xy]"), ({"type": "any_text"}, r"[\s\S]*"),
    ({"type": "sequence", "elements": [WORD, {"type": "const_string", "value": "!"}, WORD]}, "[a-c]{2}![a-c]{2}"),
    ({"type": "or", "elements": [TAG, OTHER]}, CALL), ({"type": "optional", "content": WORD}, "([a-c]{2})?"),
    ({"type": "star", "content": WORD}, "([a-c]{2})*"), ({"type": "plus", "content": WORD}, "([a-c]{2})+"),
    ({"type": "repeat", "content": WORD, "min": 1, "max": 2}, "([a-c]{2}){1,2}"),
    ({"type": "repeat", "content": WORD, "min": 2, "max": -1}, "([a-c]{2}){2,}"),
    ({"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "!"}, "<a>[^!]*!"),
    ({"type": "any_text", "excludes": ["a", '"b']}, '((?!a|"b)[\\s\\S])*'),
    ({"type": "tag", "begin": "<a>", "content": {"type": "any_text", "excludes": ["a"]}, "end": "!"}, "<a>[^!a]*!"),
    ({"type": "tags_with_separator", "tags": [TAG, OTHER], "separator": ", "}, f"(({CALL})(, ({CALL}))*)?"),
    ({"type": "tags_with_separator", "tags": [TAG], "separator": ",", "at_least_one": True,
     "stop_after_first": True}, CALL),
    ({"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": [TAG, OTHER]}, rf"((?!<[fg])[\s\S]|{CALL})*"),
    ({"type": "triggered_tags", "triggers": ["<"], "tags": [TAG, OTHER], "at_least_one": True,
     "stop_after_first": True},
     rf"[^<]*({CALL})"),
]  # fmt: skip


def texts(tag: dict[str, Any]) -> list[str]:
    random, grammar = Random(1), Grammar(kind="structural_tag", text=json.dumps(tag), field="response_format")
    found = [sample(grammar, random) for _ in range(12)]
    return [text for text in found if text is not None]


@pytest.mark.parametrize(("form", "pattern"), FORMATS, ids=lambda value: str(value)[:60])
def test_formats(form: dict[str, Any], pattern: str) -> None:
    found = texts({"type": "structural_tag", "format": form})
    assert found
    assert [text for text in found if not re.fullmatch(pattern, text)] == []


def test_the_older_form() -> None:
    structures = [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}]
    found = texts({"type": "structural_tag", "structures": structures, "triggers": ["<f"]})
    assert found
    assert [text for text in found if not re.fullmatch(rf"((?!<f)[\s\S]|{CALL})*", text)] == []


def test_special_tokens_are_tokens() -> None:
    tag = {"type": "tag", "begin": "<|a|>x<|bc|>", "content": {"type": "token", "token": "<|a|>"}, "end": "<|b"}
    lark = structural_tag_to_lark({"format": tag}, {"<|a|>": 7, "<|b": 8, "<|bc|>": 9}, (), 16, "a")
    assert json.loads(lark)["grammars"][0]["lark_grammar"] == 'start: <[7]> "x" <[9]> <[7]> (<[8]>)'


@pytest.mark.parametrize(
    ("form", "message"),
    [(None, "/format/type is none of const_string, "), ({"type": "dispatch"}, "/format/type is none of"),
     ({"type": "any_text", "excludes": [5]}, "/format/excludes is no list of texts"),
     ({"type": "any_text", "x": 1}, "/format/x is not supported in any_text"),
     ({**ONE, "style": "qwen_xml"}, "/format/style 'qwen_xml' is not supported"),
     ({**ONE, "any_order": True}, "/format/any_order"),
     ({"type": "json_schema", "json_schema": {"not": {}}}, "/format/json_schema/not cannot be enforced"),
     ({"type": "json_schema", "json_schema": 5}, "/format/json_schema is no JSON schema"),
     ({"type": "regex", "pattern": r"\Aa"}, r"/format/pattern: the anchor \A"),
     ({"type": "regex"}, "/format/pattern is no str"),
     ({"type": "grammar", "grammar": "root ::= x"}, "/format/grammar: the grammar is neither"),
     ({"type": "sequence", "elements": []}, "/format/elements is empty"),
     ({"type": "or", "elements": [5]}, "/format/elements/0/type"),
     ({"type": "token", "token": "<|nope|>"}, "/format/token is no token id"),
     ({"type": "token", "token": 10**9}, "/format/token"),
     ({"type": "token", "token": True}, "/format/token"),
     ({"type": "repeat", "content": WORD, "min": 3, "max": 2}, "/format repeats"),
     ({"type": "repeat", "content": WORD, "min": 0, "max": 10**6}, "/format repeats 0 to 1000000 times"),
     ({**TAG, "end": 5}, "/format/end is no text or token"),
     ({**TAG, "begin": None}, "/format/begin is no text or token"),
     ({"type": "triggered_tags", "triggers": ["x"], "tags": [TAG]},
      "/format/tags/0/begin begins with 0 of the triggers"),
     ({"type": "triggered_tags", "triggers": ["<"], "tags": []}, "/format/tags is no list of tags"),
     ({"type": "token_triggered_tags", "trigger_tokens": [3], "tags": [TAG]}, "/format/tags/0/begin is no dict")],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_refused(form: Any, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        texts({"type": "structural_tag", "format": form})
    assert refusal.value.message.startswith(f"response_format: {message}"), refusal.value.message
