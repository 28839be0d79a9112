# SPDX-License-Identifier: Apache-2.0
"""Compilation is bounded, says what is wrong, and is kept."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any, Literal

import pytest

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError
from dflash_trt.runtime.grammars import compiler as grammar_compiler
from dflash_trt.runtime.grammars.compiler import GrammarCompiler
from tests.runtime.grammars.sampler import END, VOCAB_SIZE, compiler, tokenizer


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [("regex", "a" * 70_000, "are more than 65536"), ("json_schema", "[" * 65, "more than 64 levels"),
     ("regex", "(" * 33, "more than 32"),
     ("json_schema", "{", "the json_schema is no JSON object"), ("json_schema", "[]", "is no JSON object"),
     ("structural_tag", "5", "the structural_tag is no JSON object"),
     ("structural_tag", "{}", "/format/type is none of"),
     ("choice", "[]", "the choices are no JSON list of texts"),
     ("choice", "[1]", "the choices are no JSON list of texts"),
     ("json_schema", "false", "is no JSON object")],
    ids=lambda value: value[:20],
)  # fmt: skip
def test_what_does_not_compile(kind: Literal["regex"], text: str, problem: str) -> None:
    with pytest.raises(RequestError) as refusal:
        compiler().processor(Grammar(kind=kind, text=text, field="a"))
    assert refusal.value.message.startswith("a: ")
    assert problem in refusal.value.message
    assert len(refusal.value.message) < 500


NESTED: dict[str, Any] = {"type": "string"}
for _ in range(30):
    NESTED = {"type": "object", "properties": {"a": NESTED}}
MANY = {"type": "object", "properties": {f"k{i}": {"type": "string", "maxLength": i} for i in range(150)}}


@pytest.mark.parametrize("schema", [NESTED, MANY, {"enum": [f"v{i * 7919 % 10007}" for i in range(4000)]}, {}])
def test_limits_leave_room_for_honest_schemas(schema: dict[str, Any]) -> None:
    compiler().processor(Grammar(kind="json_schema", text=json.dumps(schema)))


def test_a_long_chain_of_references() -> None:
    names = [f"a{i}" for i in range(400)]
    definitions = {name: {"properties": {"x": {"$ref": f"#/$defs/{after}"}}} for name, after in pairwise(names)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**definitions, names[-1]: {"type": "string"}}}
    compiler().processor(Grammar(kind="json_schema", text=json.dumps(schema)))


def test_the_last_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "NUM_KEPT", 3)
    grammars = [Grammar(kind="regex", text=f"[a-z]{{{i + 1}}}") for i in range(5)]
    first = compiler().submit(grammars[0]).result()
    for grammar in grammars:
        assert compiler().submit(grammar).result() is compiler().submit(grammar).result()
        assert compiler().submit(grammars[0]).result() is first
    assert compiler().submit(grammars[1]).result() is compiler().submit(grammars[1]).result()


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="the target has no tokenizer"):
        GrammarCompiler(None, VOCAB_SIZE, {END})
    with pytest.raises(RequestError, match="the target has no end-of-sequence tokens"):
        GrammarCompiler(tokenizer(), VOCAB_SIZE, ())
    with pytest.raises(RequestError, match="the target's tokenizer is no fast tokenizer"):
        GrammarCompiler(object(), VOCAB_SIZE, {END})
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="the package llguidance is not installed"):
        GrammarCompiler(tokenizer(), VOCAB_SIZE, {END})
