# SPDX-License-Identifier: Apache-2.0
"""Damaged files of every kind are read, or refused with an error that names them; none ends in a traceback."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.schema import load_schema
from dflash_trt.errors import ConfigError, DFlashError
from tests.deploy.foreign.cases import FILES, REFUSED

PIECES = (
    *"'\"\\$`(){}[]:-=;|#%/~\n\t\x00\x1b\u202e",
    *(
        "é",
        "${",
        "$(",
        ": ",
        "--",
        "- ",
        "<<EOF",
        "&&",
        "null",
        "true",
        "1e999",
        "-1",
        "99999999999999999999",
        "&a",
        "*a",
    ),
    *("!!python/object", "---\n", " --config x.yaml", " --config=", "$A", "A=$A$A\n", "..", "0x1F", "no-"),
)


def mutated(text: str, draw: random.Random) -> str:
    """A text with one to four edits: cut, repeated, moved or foreign pieces."""
    for _ in range(draw.randint(1, 4)):
        begin, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        end = min(end, begin + draw.choice((1, 4, 40, 400)))
        piece = text[begin:end]
        match draw.randrange(6):
            case 0:
                text = text[:begin] + text[end:]
            case 1:
                text = text[:begin] + draw.choice(PIECES) + text[begin:]
            case 2:
                text = text[:begin] + draw.choice(PIECES) + text[end:]
            case 3:
                text = text[:end] + piece * draw.randint(1, 3) + text[end:]
            case 4:
                text = text[:begin]
            case _:
                rest = text[:begin] + text[end:]
                place = draw.randrange(len(rest) + 1)
                text = rest[:place] + piece + rest[place:]
    return text


def cases(number: int, seed: int) -> Iterator[tuple[str, str]]:
    draw = random.Random(seed)
    for index in range(number):
        runtime, text = FILES[index % len(FILES)]
        yield runtime, mutated(text, draw)


def check_all(number: int, seed: int, folder: Path) -> tuple[int, int]:
    """How many of the damaged files are checked, and how many refused."""
    (folder / "x.yaml").write_text("port: 1\n")
    gpus, checked, refused = parse_gpus("h200x8", "--gpus"), 0, 0
    for runtime, text in cases(number, seed):
        try:
            for config in file_configs(folder / "file", load_schema(runtime), text=text, gpus=gpus):
                assert all(finding.problem and finding.fix for finding in check(config)), text
            checked += 1
        except DFlashError:
            refused += 1
    return checked, refused


def test_every_file_is_read_as_it_is(tmp_path: Path) -> None:
    for runtime, text in FILES:
        with pytest.raises(ConfigError, match="disaggregated") if text == REFUSED else nullcontext():
            assert file_configs(tmp_path / "file", load_schema(runtime), text=text)


def test_damaged_files(tmp_path: Path) -> None:
    checked, refused = check_all(200, 1, tmp_path)
    assert min(checked, refused) > 20


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_damaged_files(seed: int, tmp_path: Path) -> None:
    checked, refused = check_all(300, seed, tmp_path)
    assert min(checked, refused) > 30
