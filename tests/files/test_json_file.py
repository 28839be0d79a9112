# SPDX-License-Identifier: Apache-2.0
"""JSON objects: what is none, or says something twice, is refused with the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import json_object, read_bytes

FILE = Path("directory/file.json")


def test_an_object() -> None:
    assert json_object(b'{"a": {"b": [1, null]}}', FILE, ConfigError) == {"a": {"b": [1, None]}}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"{", r"a list of rows, found text that is not JSON \("),
        (b"3", "a list of rows, found int"),
        (b'{"a": 1, "b": 2, "a": 1}', "a list of rows with each key once, found 'a' twice"),
        (b'{"outer": {"a": 1, "a": 2}}', "a list of rows with each key once, found 'a' twice"),
    ],
)
def test_what_is_none(content: bytes, found: str) -> None:
    with pytest.raises(ConfigError, match=f"{FILE}: expected {found}") as caught:
        json_object(content, FILE, ConfigError, what="a list of rows", hint="write it anew")
    assert caught.value.hint == "write it anew"


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a readable file, found: Is a directory"):
        read_bytes(tmp_path, ConfigError)
