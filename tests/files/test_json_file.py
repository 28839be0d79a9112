# SPDX-License-Identifier: Apache-2.0
"""JSON from outside: what is none, says something twice or is too much to hold is refused with the file's name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import MAX_DEPTH, MAX_VALUES, json_document, json_object, read_json

FILE = Path("directory/file.json")


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_an_object() -> None:
    assert json_object(b'{"a": {"b": [1, null]}}', FILE, ConfigError) == {"a": {"b": [1, None]}}


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"18446744073709551615", 2**64 - 1),
        (b"-9223372036854775808", -(2**63)),
        (b"1e308", 1e308),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b'"\\\\ud800"', "\\ud800"),  # a backslash, and no escape
    ],
)
def test_what_is_just_allowed(content: bytes, value: object) -> None:
    assert json_document(content, FILE, ConfigError) == value
    json_document(nested(MAX_DEPTH), FILE, ConfigError)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"{", r"found text that is not JSON \("),
        (b"3", "found int"),
        (b'{"a": 1, "b": 2, "a": 1}', "with each key once, found 'a' twice"),
        (b'{"outer": {"\\u001b": 1, "\\u001b": 2}}', r"with each key once, found '\\x1b' twice"),
        (b'{"a": 18446744073709551616}', "found an integer of 20 digits, beyond 64 bits"),
        (b'{"a": -' + b"9" * 4000 + b"}", "found an integer of 4000 digits, beyond 64 bits"),
        (b'{"a": NaN}', "found the number NaN, which is not finite"),
        (b'{"a": -Infinity}', "found the number -Infinity, which is not finite"),
        (b'{"a": 1e999}', "found the number 1e999, which is not finite"),
        (b'{"a": "\\uD800"}', r"found half of a surrogate pair, '\\ud800'"),
        (b'{"\\udfff": 1}', r"found half of a surrogate pair, '\\udfff'"),
        (nested(MAX_DEPTH + 1), f"found more than {MAX_DEPTH} levels"),
        (nested(100_000), f"found more than {MAX_DEPTH} levels"),
        (b"[" + b"0," * MAX_VALUES + b"0]", f"found {MAX_VALUES + 1} values, more than {MAX_VALUES}"),
        (b"\xef\xbb\xbf{}", "found text that is not JSON"),
    ],
)
def test_what_is_none(content: bytes, found: str) -> None:
    with pytest.raises(ConfigError, match=f"{FILE}: expected a list of rows,? {found}") as caught:
        json_object(content, FILE, ConfigError, what="a list of rows", hint="write it anew")
    assert caught.value.hint == "write it anew"


def test_what_is_not_utf8() -> None:
    with pytest.raises(ConfigError, match=f"{FILE}: expected a JSON object, found byte 0xff at 2, which is not UTF-8"):
        json_object(b'{"\xff": 1}', FILE, ConfigError)


def test_infinity_beside_facts() -> None:
    """transformers writes it into configurations of state-space models."""
    assert json_object(b'{"a": [0.0, Infinity]}', FILE, ConfigError, finite=False) == {"a": [0.0, float("inf")]}


class Point(msgspec.Struct, frozen=True):
    x: int


def test_a_file_of_a_kind(tmp_path: Path) -> None:
    file = tmp_path / "point.json"
    file.write_text('{"x": 3}')
    assert read_json(file, Point, ConfigError, what="a point") == Point(3)
    file.write_text('{"x": "3"}')
    with pytest.raises(ConfigError, match=r"point.json: expected a point, found Expected `int`, got `str` - at `\$.x`"):
        read_json(file, Point, ConfigError, what="a point")
