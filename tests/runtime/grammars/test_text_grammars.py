# SPDX-License-Identifier: Apache-2.0
"""Answers to regular expressions, choices, EBNF and Lark are read by Python's re and by Lark."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Literal

import pytest
from lark import Lark

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError
from tests.runtime.grammars.sampler import sample


def texts(kind: Literal["regex", "choice", "grammar"], text: str, number: int = 10) -> list[str]:
    """Random answers, without those that have not ended."""
    random = Random(1)
    found = [sample(Grammar(kind=kind, text=text), random) for _ in range(number)]
    whole = [each for each in found if each is not None]
    assert whole
    return whole


REGEXES = [
    "[a-z]{3}", r"(def|class) [a-z_]{3,9}\([a-z]?\):", r"^\d{4}-\d\d$", "^a|b$", "(^a)|b", "a{2}|[^a-z]", r"\w+\s\w*",
    r"(?i)yes|no", r"(?P<x>a+)b", "a*?b", r"[\]\[^-]+", r"\\\.", "x/y", "//", "#a", "", "é+|😀", r"[\d.]+", "[^]a]",
    r"\W",
    r"a\$", "[a^b$]+", "((a{1,3}b?){2}c)+", r"\x41\t", "(?s:.)x", "a|", "(?:ab)*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", REGEXES)
def test_regular_expressions(pattern: str) -> None:
    assert [
        text
        for text in texts("regex", pattern)
        if not re.fullmatch(pattern, text, 0 if "(?i)" in pattern else re.ASCII)
    ] == []


@pytest.mark.parametrize(
    ("pattern", "construct"),
    [(r"\Aab\Z", r"the anchor \A"), (r"ab\Z", r"the anchor \Z"), (r"\bab", r"the word boundary \b"),
     ("(?=a)b", "lookahead"),
     ("(?!a)b", "lookahead"), ("(?<=a)b", "lookbehind (?<="), ("(?<!a)b", "lookbehind (?<!"),
     (r"(a)\1", r"backreference \1"),
     ("a*+b", "possessive quantifier *+"), ("a++", "possessive"), ("a?+", "possessive"), ("a{2}+", "possessive"),
     ("(?>a)", "atomic group"), ("[a&&b]", "set operator &&"), ("[a--b]", "set operator --"),
     ("[a[b]]", "set operator ["),
     ("[[:alpha:]]", "set operator ["), ("[a~~b]", "set operator ~~"), ("a^b", "lookarounds not supported"),
     ("a$b", "Start"),
     ("(", "unclosed group"), ("[a", "unclosed character class"), ("a{3,1}", "invalid repetition count range"),
     ("*", "repetition"),
     ("a" * 4097, "4097 characters")],
)  # fmt: skip
def test_regular_expressions_that_are_refused(pattern: str, construct: str) -> None:
    with pytest.raises(RequestError) as refusal:
        texts("regex", pattern)
    assert refusal.value.message.startswith("structured_outputs: ")
    assert construct.replace("Start", "lookarounds") in refusal.value.message


CHOICES = ['say "no"', "back\\slash", "line\nbreak", "[a-z]*", "é€😀", "\x00", "//", "<|endoftext|>"]


def test_choices() -> None:
    assert set(texts("choice", json.dumps(CHOICES), 60)) == {*CHOICES}
    for text in CHOICES:
        assert texts("choice", json.dumps([text]), 1) == [text]


LARK = {
    "list": 'start: "(" item ("," item)~0..2 ")"\nitem: "self" | "None"',
    "nested": 'start: "(" start* ")" | WORD\nWORD: /[a-z]{1,3}/',
    "sum": 'start: term ("+" term)*\nterm: number ("*" number)*\nnumber: INT | "(" start ")"\n%import common.INT',
    "ignore": 'start: "a" "b"+\n%ignore / /',
    "optional": '?start: a -> x\na: "a" ["b"] C?\nC: "c" | "d"i',
}
EBNF = {
    "list": 'root ::= "(" item ("," item){0,2} ")"\nitem ::= "self" | "None"',
    "nested": 'root ::= "(" root* ")" | word\nword ::= [a-z]{1,3}',
    "sum": 'root ::= product ("+" product)*\nproduct ::= num ("*" num)*\nnum ::= [0-9]+ | "(" root ")"',
    "escapes": r'root ::= "\x41\u00e9" [\u0042-\u0043] "\n\t\\\"" [^\]a-z]  # a comment',
    "any-name": 'root ::= any-name\nany-name ::= any_other . \nany_other ::= ("x" |\n "y")',
}
READ_BY = LARK | {
    "escapes": r"start: /Aé[BC]\s\s.{2}[^\]a-z]/",
    "any-name": "start: /[xy]./",
}


@pytest.mark.parametrize(
    "text", [*LARK.values(), *EBNF.values()], ids=[*map("lark {}".format, LARK), *map("ebnf {}".format, EBNF)]
)
def test_grammars_are_read_by_lark(text: str) -> None:
    name = next(name for grammars in (LARK, EBNF) for name, grammar in grammars.items() if grammar == text)
    reader = Lark(READ_BY[name])
    for answer in texts("grammar", text):
        reader.parse(answer)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("root ::= x", "Rule 'x' not found"), ("", "neither Lark nor EBNF"), ('root ::= "a', "neither Lark nor EBNF"),
     ('main ::= "a"', "No 'root' rule"), ('root ::= "a" "\\', "neither Lark nor EBNF"),
     ("root ::= root", "no text matches"),
     ('root ::= A | a\nA ::= "x"\na ::= "y"', "already exists"), ("start: start", "no text matches"),
     ("start: x", 'unknown name: "x"'), ('start: "a', "cannot be enforced"),
     ("start: <|nope|>", "the target has no special token '<|nope|>'"),
     ('start: A & B\nA: "a"\nB: "b"', "'&' is not supported"), ('start: A\nA: ~"a"', "the complement ~"),
     ('start: %json {"uniqueItems": true}', "'%json' is not supported"), ("start: @other", "'@' is not supported"),
     ('start: A\nA: %regex {"substring_chars": "a"}', "'%regex' is not supported"),
     ("start: /a(?=b)/", "the lookahead"),
     ('start: "a"\n' + "// " + "x" * 8192, "characters; at most 8192"), ('start.2: "a"', "priority not supported")],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_grammars_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(RequestError) as refusal:
        texts("grammar", text)
    assert refusal.value.message.startswith("structured_outputs: ")
    assert problem in refusal.value.message
