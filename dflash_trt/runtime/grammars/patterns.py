# SPDX-License-Identifier: Apache-2.0
"""Regular expressions: constructs that llguidance cannot enforce, or reads differently from Python and JavaScript.

llguidance 1.9.1 reads Rust's syntax. It refuses most of what it cannot enforce, and gives another meaning to set
operators in a class and to possessive quantifiers.
"""

from __future__ import annotations

import re

from dflash_trt.errors import RequestError, cut, shown

MAX_PATTERN = 4096
"""Characters of a regular expression. Compile time may grow with the square: 2,000 times a? took 0.2 s."""

ITEM = re.compile(r"\\.|\[\^?\]?|\(\?.|[*+?}]\+|.", re.DOTALL)
"""An escape, the start of a class, the start of a special group, a possessive quantifier, or any character."""
GROUPS = {"(?=": "lookahead", "(?!": "lookahead", "(?>": "atomic group", "(?#": "comment", "(?(": "condition"}
WORD_BOUNDARIES = (r"\b", r"\B", r"\<", r"\>")
ANCHORS = (r"\A", r"\Z", r"\z", r"\G")
SET_OPERATORS = ("&&", "--", "~~")


def check_pattern(pattern: str, place: str) -> None:
    """Raises RequestError, whose text begins with `place`, for a construct that cannot be enforced as written."""
    if (size := len(pattern)) > MAX_PATTERN:
        raise RequestError(f"{place}: the regular expression has {size} characters; at most {MAX_PATTERN} are allowed")
    if (construct := _unsupported(pattern)) is not None:
        raise RequestError(f"{place}: {construct} in a regular expression cannot be enforced: {shown(pattern)}")
    from llguidance import LLMatcher

    if error := LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern)):
        raise RequestError(f"{place}: the regular expression {shown(pattern)} cannot be enforced: {reason(error)}")


def reason(error: str) -> str:
    """One line of an error message of llguidance, which quotes the grammar over several lines."""
    lines = [line for line in error.partition("\n<")[0].splitlines() if line.strip()]
    named = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    first = (named or lines or [error])[0]
    return "the branches of a oneOf overlap" if first.startswith("oneOf constraints are not") else cut(first)


def _unsupported(pattern: str) -> str | None:
    is_class = False
    for match in ITEM.finditer(pattern):
        item, begin = match[0], match.start()
        if is_class:
            if item.startswith("[") or (item := pattern[begin : begin + 2]) in SET_OPERATORS:
                return f"the set operator {item}"
            is_class = match[0] != "]"
        elif item in GROUPS:
            return f"the {GROUPS[item]} {item}"
        elif item == "(?<" and pattern[begin + 3 : begin + 4] in ("=", "!"):
            return f"the lookbehind {pattern[begin : begin + 4]}"
        elif item in WORD_BOUNDARIES:
            return f"the word boundary {item}"
        elif item in ANCHORS:
            return f"the anchor {item}"
        elif item[0] == "\\" and item[1:] in "123456789":
            return f"the backreference {item}"
        elif len(item) == 2 and item[1] == "+" and item[0] != "\\":
            return f"the possessive quantifier {item}"
        else:
            is_class = item.startswith("[")
    return None
