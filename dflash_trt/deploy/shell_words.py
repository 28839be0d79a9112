# SPDX-License-Identifier: Apache-2.0
"""Words and here-documents of a shell script's simple commands, with their places in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator

HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
SEPARATORS = ";&|\n()"
ARRAY, ARRAY_END = "(", ")"
"""Value of an assignment that begins an array, and the word that ends it: `A=(`, words, `)`."""
ARRAY_BEGIN = re.compile(r"[A-Za-z_]\w*\+?=")


class Word(str):
    """A word or here-document of a script, as the shell reads it, with its place in the text."""

    begin: int
    end: int

    def __new__(cls, value: str, begin: int, end: int) -> Word:
        """`value` stands for the characters from `begin` up to `end`."""
        word = super().__new__(cls, value)
        word.begin, word.end = begin, end
        return word


def statements(text: str) -> Iterator[tuple[list[Word], list[Word]]]:
    """Words of each simple command, and its here-documents."""
    words: list[Word] = []
    word: str | None = None
    ends: list[str] = []  # words that end here-documents of this line
    begin = position = 0
    is_array = False
    while position < len(text):
        char, following = text[position], text[position + 1 : position + 2]
        begin = position if word is None else begin
        if char == "\\":
            word = word if following == "\n" else (word or "") + following
            position += 2
        elif char in "'\"":
            position, quoted = _quoted(text, position)
            word = (word or "") + quoted
        elif char == "<" and (here := HERE.match(text, position)) is not None:
            ends.append(here[2])
            position = here.end()
        elif char == "#" and word is None:
            position = _line_end(text, position)
        elif char == "$" and following in ("{", "("):
            end = text.find("}" if following == "{" else ")", position) % (len(text) + 1)
            word, position = (word or "") + text[position : end + 1], end + 1
        elif char == "&" and (following == ">" or (word or "").endswith((">", "<"))):  # &> log, 2>&1
            word = (word or "") + char
            position += 1
        elif char == ARRAY and ARRAY_BEGIN.fullmatch(word or ""):
            words.append(Word(f"{word}{ARRAY}", begin, position + 1))
            word, is_array = None, True
            position += 1
        elif char == ARRAY_END and is_array:
            words += [] if word is None else [Word(word, begin, position)]
            words.append(Word(ARRAY_END, position, position + 1))
            word, is_array = None, False
            position += 1
        elif char in SEPARATORS or char.isspace():
            words += [] if word is None else [Word(word, begin, position)]
            word = None
            position += 1
            if char in SEPARATORS and not is_array:
                documents = []
                while char == "\n" and ends:
                    begin = position
                    position, document = _here_document(text, position, ends.pop(0))
                    documents.append(Word(document, begin, begin + len(document)))
                if words:
                    yield words, documents
                words = []
        else:
            word = (word or "") + char
            position += 1
    if words := words + ([] if word is None else [Word(word, begin, len(text))]):
        yield words, []


def _quoted(text: str, begin: int) -> tuple[int, str]:
    """Position after a quoted part, and its value; ValueError where the quote is not closed."""
    mark, position, value = text[begin], begin + 1, ""
    while position < len(text):
        char = text[position]
        if char == mark:
            return position + 1, value
        if char == "\\" and mark == '"' and text[position + 1 : position + 2] in ('"', "\\", "$", "`", "\n"):
            value += text[position + 1].replace("\n", "")
            position += 2
            continue
        value += char
        position += 1
    line = text.count("\n", 0, begin) + 1
    raise ValueError(f"no closing quotation for the {mark} of line {line}")


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _here_document(text: str, begin: int, word: str) -> tuple[int, str]:
    """Position after a here-document that ends with `word`, and its text."""
    position = begin
    while position < len(text):
        end = _line_end(text, position)
        if text[position:end].strip() == word:
            return min(end + 1, len(text)), text[begin:position]
        position = end + 1
    return len(text), text[begin:]
