# SPDX-License-Identifier: Apache-2.0
"""Grammars in EBNF and Lark, regular expressions and lists of choices, as llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import msgspec

from dflash_trt.errors import RequestError, cut, shown
from dflash_trt.runtime.grammars.patterns import check_pattern

MAX_CHARACTERS = 8192
"""Characters of a grammar: 1,600 times "a"? took 0.3 s to compile."""

LARK_ITEM = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*|%\w+|<[^<>\s]+>|.', re.DOTALL)
"""A text, a regular expression, a comment, a directive, a special token, or any character of a Lark grammar."""
IS_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|[?!]?start\b[^:\n=]*:(?!:=))")
DIRECTIVES = ("%import", "%ignore", "%llguidance")
EBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def grammar_to_lark(text: str, special_tokens: Mapping[str, int], place: str) -> str:
    """Lark of a grammar that is Lark, if it has a rule named start, or else EBNF with a rule named root.

    Special tokens in angle brackets become ids.

    Raises RequestError, whose text begins with `place`.
    """
    if (size := len(text)) > MAX_CHARACTERS:
        raise RequestError(f"{place}: the grammar has {size} characters; at most {MAX_CHARACTERS} are allowed")
    if IS_LARK.search(text):
        return "".join(_checked_items(text, special_tokens, place))
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(EBNF_ESCAPE.sub(_plain_character, text)))
    except Exception as error:  # the converter of 1.9.1 raises Exception itself, and IndexError at the end of a text
        problem = cut(str(error)) or type(error).__name__
        raise RequestError(f"{place}: the grammar is neither Lark nor EBNF: {problem}") from None


def _plain_character(escape: re.Match[str]) -> str:
    r"""The character of a \u escape, which the converter of 1.9.1 would break, unless it is an operator's."""
    code = escape[1] or escape[2]
    character = chr(int(code, 16)) if code and int(code, 16) <= 0x10FFFF else ""
    return character if character.isalnum() else escape[0]


def _checked_items(text: str, special_tokens: Mapping[str, int], place: str) -> Iterator[str]:
    """Parts of a Lark grammar; RequestError for extensions of llguidance whose cost or meaning has no bound here."""
    for match in LARK_ITEM.finditer(text):
        item = match[0]
        if item.startswith("/") and len(item) > 2 and not item.startswith("//"):
            check_pattern(item[1:-1], place)
        elif item in ("&", "@") or (item[0] == "%" and item not in DIRECTIVES):
            raise RequestError(f"{place}: {shown(item)} is not supported in a Lark grammar")
        elif item == "~" and not re.match(r"\s*\d", text[match.end() :]):
            raise RequestError(f"{place}: the complement ~ is not supported in a Lark grammar")
        elif item[0] == "<" and len(item) > 1 and item[1] != "[":
            if item not in special_tokens:
                raise RequestError(f"{place}: the target has no special token {shown(item)}")
            item = f"<[{special_tokens[item]}]>"
        yield item


def regex_to_lark(pattern: str, place: str) -> str:
    r"""Lark of a regular expression that the whole answer matches; \d, \w and \s are ASCII."""
    from llguidance import regex_to_lark as to_lark

    check_pattern(pattern, place)
    return f"start: /{to_lark(pattern, 'dws')}/" if pattern else 'start: ""'


def choice_to_lark(choices: str, place: str) -> str:
    """Lark of a JSON list of texts, one of which is the whole answer."""
    try:
        texts = msgspec.json.decode(choices, type=list[str])
    except msgspec.DecodeError:
        texts = []
    if not texts:
        raise RequestError(f"{place}: the choices are no JSON list of texts: {shown(choices)}")
    return f"start: {' | '.join(map(json.dumps, texts))}"
