# SPDX-License-Identifier: Apache-2.0
"""Tables and numbers on stdout."""

from __future__ import annotations

import pytest

from dflash_trt.cli.output import human_bytes, print_table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (1_568_669_696, "1.5 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_cells_are_text_and_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("a [bold] title", ("what", "to fix it"), [("[/x]", "pip install 'dflash-trt[run]'")])
    output = capsys.readouterr().out
    for text in ("a [bold] title", "[/x]", "pip install 'dflash-trt[run]'"):
        assert text in output
