# SPDX-License-Identifier: Apache-2.0
"""`--config FILE`: values of the file are defaults, and every mistake in it is named."""

from pathlib import Path
from typing import Any

import click
import pytest

from dflash_trt.cli import cli
from dflash_trt.cli.bench import run as bench_run
from tests.cli.commands import run


def parsed(command: click.Command, file: Path, content: str, *words: str) -> dict[str, Any]:
    """The parameters of `command` with --config and `words`."""
    file.write_text(content)
    return command.make_context("command", ["--config", str(file), *words]).params


def test_options_come_from_the_file_unless_they_are_given(tmp_path: Path) -> None:
    text = "engine: demo\nport: 8123\nallow-origin: http://a\nenable_prefix_caching: false\ntp: 2\ncache-gib: 0.5\n"
    found = parsed(cli.commands["serve"], tmp_path / "c.yaml", text, "--port", "9000")
    assert (found["engine"], found["port"], found["num_ranks"]) == (Path("demo"), 9000, 2)
    assert (found["allow_origin"], found["enable_prefix_caching"]) == (("http://a",), False)
    assert found["cache_gib"] == 0.5


def test_mappings_are_repeated_options(tmp_path: Path) -> None:
    text = "endpoint: {none: 'http://a', dflash: 'http://b'}\nprompts: gsm8k\noutput: run\nconcurrency: 1,4\n"
    found = parsed(bench_run, tmp_path / "c.yaml", text)
    assert found["endpoints"] == (("none", "http://a"), ("dflash", "http://b"))
    assert found["concurrency"] == (1, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prot: 1\n", "dflash-trt serve has no option 'prot' (nearest option: port)"),
        ("port: [1]\n", "port: expected a value, found [1]"),
        ("port: yes\n", "port: expected a value, found true"),
        ("enable-prefix-caching: 1\n", "enable-prefix-caching: expected true or false, found 1"),
        ("allow-origin: [[a]]\n", "allow-origin: expected a list, found [['a']]"),
        ("- port\n", "expected options and their values, found ['port']"),
        ("port: 1\nport: 2\n", "key 'port' twice"),
        ("port: 70000\n", "Invalid value for '--port': 70000"),
    ],
)
def test_mistakes(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    done = run("serve", "engine", "--config", tmp_path / "c.yaml")
    assert done.returncode in (1, 2)
    assert expected in done.stderr


def test_an_option_of_the_file_counts_as_given(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("long-tokens: 4096\n")
    assert "--long-tokens is for a URL" in run("doctor", "--config", tmp_path / "c.yaml").stderr
