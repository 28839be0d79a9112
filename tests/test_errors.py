# SPDX-License-Identifier: Apache-2.0
"""Errors quote files; what a terminal would obey is shown instead, in whatever they say."""

import pytest

from dflash_trt.errors import MAX_SHOWN, ConfigError, printable, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a text, ü, 模型", "a text, ü, 模型"), ("two\nlines", "two\nlines"), ("\x1b[2J\x07", r"\x1b[2J\x07"),
     ("\rover", r"\rover"), ("\x9b31m", r"\x9b31m"), ("\u202egnp", r"\u202egnp"), ("\udcff", r"\udcff")],
)  # fmt: skip
def test_printable(text: str, expected: str) -> None:
    assert printable(text) == expected
    error = ConfigError(text, hint=text)
    assert (error.message, error.hint) == (expected, expected)
    assert str(error) == f"{expected}\nhint: {expected}"
    assert error.args == (expected,)


def test_values_are_cut() -> None:
    assert shown("short") == "'short'"
    assert shown(["\x1b"]) == r"['\x1b']"
    assert shown("x" * 10_000) == "'" + "x" * (MAX_SHOWN - 1) + "..."
