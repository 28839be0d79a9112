# SPDX-License-Identifier: Apache-2.0
"""Words of generated commands stay words: no option, no second command, whatever a file or directory is called."""

import ast
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest

from dflash_trt.deploy.command_text import command_text
from dflash_trt.deploy.deployment_file import load_deployment
from dflash_trt.deploy.render import render
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.schema import Runtime
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import argument, command_line, quoted
from tests.checkpoint.samples import refusal
from tests.deploy.deployments import BUILD_CONFIGS
from tests.paths import REPOSITORY

OWN_ARGUMENTS = {"runtime/ranks/join.py", "trtllm/llm_backend.py", "trtllm/registration.py"}  # repeat the user's own
LATENCY = BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml"


@pytest.mark.parametrize("word", ["a b", "$(reboot)", "`x`", "it's", '"', "*", "a;b", "ü", "", "-1", 3, 0.5])
def test_a_shell_reads_the_word_again(word: object) -> None:
    line = command_line(["printf", "%s", argument(word, "word")])
    assert subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout == str(word)


@pytest.mark.parametrize("word", ["--trust-remote-code", "-x", "-", "a\nreboot", "\x1b[2J", "a\rb", "a\0", "\u202e"])
def test_what_would_be_obeyed_is_refused(word: str) -> None:
    assert "model: expected " in refusal(lambda: argument(word, "model"), ConfigError)


@pytest.mark.parametrize("runtime", ["trtllm", "vllm", "sglang"])
@pytest.mark.parametrize("bad", ["--trust-remote-code", "x\nreboot"])
@pytest.mark.parametrize("field", ["target", "draft", "name", "host"])
def test_no_deployment_writes_an_option(runtime: Runtime, bad: str, field: str) -> None:
    deployment = resolve(load_deployment(LATENCY), LATENCY.stem)
    if field != "host":
        deployment = msgspec.structs.replace(deployment, **{field: bad})
    try:
        rendered = render(deployment, runtime, "dflash", host=bad if field == "host" else "127.0.0.1", port=8000)
    except ConfigError:
        return
    # The text stays a value in YAML, a comment, or a part of a word: no word of its own, no line of its own.
    words = shlex.split(rendered.start("FILE")) + (
        shlex.split(rendered.text, comments=True) if runtime != "trtllm" else []
    )
    assert bad not in words
    assert "\nreboot" not in rendered.text


def test_values_of_commands_that_are_checked(tmp_path: Path) -> None:
    refusal(lambda: command_text("vllm", {"model_tag": "--served-model-name"}), ConfigError)
    refusal(lambda: command_text("sglang", {"model_path": "-x"}), ConfigError)
    assert command_text("vllm", {"model_tag": "m", "seed": -1}) == "vllm serve m \\\n  --seed -1\n"


def test_paths_in_hints() -> None:
    assert quoted(Path("-x y")) == "'./-x y'"
    assert quoted(Path("/tmp/engine")) == "/tmp/engine"


def test_nobody_quotes_past_it() -> None:
    package = REPOSITORY / "dflash_trt"
    found = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if "shlex" in (text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if getattr(node, "attr", getattr(node, "id", "")) in ("join", "quote")
        and ast.unparse(node) in ("shlex.join", "shlex.quote", "quote")
    }
    assert found == {"files/command.py", *OWN_ARGUMENTS}
