# SPDX-License-Identifier: Apache-2.0
"""Comments and docstrings, in Python, C++ and CUDA, are sentences that a native engineer would write."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.paths import REPOSITORY


class Habit(NamedTuple):
    """A pattern of sentences to avoid, with an example of each kind."""

    pattern: str
    wrong: str
    right: str


FRAGMENT = r"(?:Of|That|Those|And|Or|What|Whatever|Who|Whoever|Whose|Which|Nor)\b"
OPENING = rf"(?:{FRAGMENT}|(?:The same|As|Its|Until|Also)\b)"
HABITS = {
    "a comment that begins in the middle of a sentence": Habit(
        rf"\A\W*(?i:{OPENING})", "of each span anew", "Constructed anew for each span."
    ),
    "a sentence that begins with a conjunction or a pronoun": Habit(
        rf"(?:[.!?]\s+|\n\s*\n\s*){FRAGMENT}", "Reads a row. And its order.", "Reads a row and its order."
    ),
    "a vague person": Habit(
        r"(?i:\b(?:nobody|somebody|everybody|whoever)\b)", "memory that nobody writes", "read-only memory"
    ),
    "behind instead of after": Habit(
        r"(?i:\bbehind\b(?! (?:an?|the) (?:[\w-]+ )?(?:proxy|firewall|balancer|frontend|flag)\b))",
        "the value heads behind the key heads", "a server behind a proxy",
    ),
    "so many or as many instead of a number": Habit(
        r"(?i:\bso many(?:eth)?\b|\bas (?:many|much)\b(?!(?: \S+){0,3}? as\b))",
        "at most so many warps", "holds as many warps as fit",
    ),
    "what something makes of something": Habit(
        r"(?i:\bwhat [\w`.' ]{1,30} (?:makes?|made) of\b)", "what Triton makes of it", "Triton's output for it"
    ),
}  # fmt: skip

# Cheap test of a whole file: the parsers need run only if it matches.
SUSPECT = re.compile(
    rf"""(?:\#|//|\*|\""")\W*(?i:{OPENING})|[.!?]["'`)]*\s+(?:\#|//)?\s*{FRAGMENT}|\n\s*\n\s*{FRAGMENT}"""
    r"|(?i:\b(?:nobody|somebody|everybody|whoever|behind|so many|as many|as much|makes? of|made of)\b)"
)
CPP_COMMENT = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?P<comment>//[^\n]*|/\*.*?\*/)', re.DOTALL)
ROOMS = ["plugins", "cpp", "dflash_trt", "benchmarks", "tools", "tests"]


def joined(lines: list[tuple[int, bool, str]]) -> Iterator[tuple[int, str]]:
    """Joins comments that fill successive lines; each item has its line, whether it fills that line, and its text."""
    block: list[str] = []
    first = last = 0
    for number, fills_line, text in lines:
        if not (block and fills_line and number == last + 1):
            yield from [(first, "\n".join(block))] if block else []
            block, first = [], number
        block.append(text)
        last = number if fills_line else -1
    yield from [(first, "\n".join(block))] if block else []


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT]
    yield from joined(
        [(token.start[0], token.line.lstrip().startswith("#"), token.string.lstrip("#: ")) for token in tokens]
    )
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def cpp_prose(text: str) -> Iterator[tuple[int, str]]:
    lines = []
    for match in CPP_COMMENT.finditer(text):
        if match["comment"] and "SPDX" not in match["comment"]:
            before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
            lines.append((text.count("\n", 0, match.start()) + 1, not before.strip(), match["comment"].strip("/* ")))
    yield from joined(lines)


def findings(path: Path) -> list[str]:
    """Sentences of a source file that have a habit, with their lines."""
    text = path.read_text()
    if not SUSPECT.search(text):
        return []
    return [
        f"{path.relative_to(REPOSITORY)}:{line}: {habit}: {sentences[max(match.start() - 30, 0) : match.end() + 40]!r}"
        for line, sentences in READERS[path.suffix](text)
        for habit, (pattern, _, _) in HABITS.items()
        for match in re.finditer(pattern, sentences)
    ]


READERS = {".py": python_prose} | dict.fromkeys((".cpp", ".h", ".cu", ".cuh"), cpp_prose)


@pytest.mark.parametrize("room", ROOMS)
def test_sentences_stand_alone(room: str) -> None:
    sources = [path for path in sorted((REPOSITORY / room).rglob("*")) if path.suffix in READERS]
    assert sources
    assert [finding for path in sources for finding in findings(path)] == []


@pytest.mark.parametrize("habit", HABITS)
def test_each_habit_is_recognised(habit: str) -> None:
    pattern, wrong, right = HABITS[habit]
    assert re.search(pattern, wrong)
    assert SUSPECT.search(f"# {wrong}")
    assert not any(re.search(other.pattern, right) for other in HABITS.values())


def test_every_kind_of_comment_is_read() -> None:
    source = '"""Doc."""\n# One,\n#: two.\nx = "# no"  # three\n# four\nclass A:\n    y = 1\n    """Of y."""\n'
    assert sorted(python_prose(source)) == [(1, "Doc."), (2, "One,\ntwo."), (4, "three"), (5, "four"), (8, "Of y.")]
    source = '// One,\n// two.\nint x = f("// no");  // three\n/* four */\n'
    assert list(cpp_prose(source)) == [(1, "One,\ntwo."), (3, "three"), (4, "four")]
