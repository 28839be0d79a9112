# SPDX-License-Identifier: Apache-2.0
"""Names of models and files reach every text that is written as they are, or are refused before it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dflash_trt.errors import DFlashError
from tests.cli.commands import run, run_here
from tests.paths import FIXTURES

PIECES = [
    "FILE", "/config/serve.yaml", "$HOME", "$(id)", "`id`", "'", '"', "{a: b}", "}", "{", "\n", ": ", " #", "&x", "*",
    "!x", "%", "\\", "<name>", "--x", "é", ",", "[", "~", "|", ">", "\t", "END_OF_CONFIG", "END_OF_JOB",
]  # fmt: skip
NAMES = st.lists(st.sampled_from([*PIECES, "a", "b/c", "-"]), min_size=1, max_size=5).map("".join)
KINDS: list[tuple[str, ...]] = [
    *(("--runtime", runtime) for runtime in ("trtllm", "vllm", "sglang")),
    *(
        ("--runtime", runtime, "--launcher", launcher, "--image", "registry/image:1")
        for runtime in ("trtllm", "vllm", "sglang") for launcher in ("slurm", "kubernetes")
    ),
    *(("--runtime", f"dynamo-{runtime}", "--image", "registry/image:1") for runtime in ("trtllm", "vllm", "sglang")),
]  # fmt: skip
BASE = {
    "description": "d", "target": "Qwen/Qwen3-8B", "draft": "z-lab/Qwen3-8B-DFlash-b16", "gpus": "h200x1",
    "purpose": "latency",
}  # fmt: skip


def strings(value: Any) -> Iterator[str]:
    """Every text in a document, those within texts of YAML, JSON or shell included."""
    if isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in strings(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in strings(part))
    elif isinstance(value, str):
        yield value
        for read in (json.loads, yaml.safe_load, lambda text: shlex.split(text, comments=True)):
            try:
                inner = read(value)
            except (ValueError, yaml.YAMLError):
                continue
            if inner not in (value, [value]) and isinstance(inner, (dict, list)):
                yield from strings(inner)


def shell(text: str) -> list[str]:
    """The words of a script that bash takes; here-documents are read as words, too."""
    subprocess.run(["bash", "-n"], input=text.encode(), check=True, capture_output=True)
    return shlex.split(text.replace("\\\n", " ").replace("<<'", "<< '"), comments=True)


def check_texts(name: str, kind: tuple[str, ...], method: str, file: str) -> None:
    """Writes with a target or EAGLE-3 draft of this `name` into `file`; reads both texts again."""
    changes = {"eagle3": {"model": name}} if method == "eagle3" else {"target": name}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("mine.yaml").write_text(json.dumps(BASE | changes))
        words = ["serve-config", "mine.yaml", *kind, "--method", method]
        result = run(*words, "-o", file)
        if result.returncode:
            with pytest.raises(DFlashError):
                run_here(*words, "-o", file)
            assert [each.name for each in Path().iterdir()] == ["mine.yaml"]
            return
        steps, written = result.stdout, Path(file).read_text()
        subprocess.run(["bash", "-n"], input=steps.encode(), check=True)
        if kind[1].startswith("dynamo") or "kubernetes" in kind:
            found = list(strings(list(yaml.safe_load_all(written))))
        elif "slurm" in kind:
            subprocess.run(["bash", "-n"], input=written.encode(), check=True)
            config = re.search("<<'END_OF_CONFIG'\n(.*\n)END_OF_CONFIG\n", written, re.S)
            found = list(strings(yaml.safe_load(config[1]))) if config else []
            command = written.replace(config[0], "\n") if config else written
            found += list(strings(shlex.split(command.replace("\\\n", " "), comments=True)))
        elif kind[1] == "trtllm":
            found = list(strings(yaml.safe_load(written)))
            found += shlex.split(next(line for line in steps.splitlines() if "--entrypoint" in line), comments=True)
        else:
            found = list(strings(shell(written)))
        assert name in found, (name, kind, written)
        jobs = [yaml.safe_load(job) for job in re.findall("<<'END_OF_JOB'\n(.*?)\nEND_OF_JOB\n", steps, re.S)]
        downloads = [text for text in (*strings(jobs), *steps.splitlines()) if "hf download" in text]
        assert any(name in text for line in downloads for text in strings(line)), steps


@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
@given(NAMES, st.sampled_from(KINDS), st.sampled_from(["none", "eagle3"]), st.sampled_from(["out", "a b.yaml", "'x"]))
@example("FILE", ("--runtime", "trtllm"), "none", "out")
@example("x/config/serve.yaml", KINDS[3], "none", "out")
@example("a: b", KINDS[4], "eagle3", "out")
def test_names_arrive_as_they_are_or_are_refused(name: str, kind: tuple[str, ...], method: str, file: str) -> None:
    check_texts(name, kind, method, file)


@pytest.mark.full
@settings(deadline=None, max_examples=2000, suppress_health_check=list(HealthCheck))
@given(NAMES, st.sampled_from(KINDS), st.sampled_from(["none", "eagle3"]), NAMES.filter(lambda name: "/" not in name))
def test_many_names_arrive(name: str, kind: tuple[str, ...], method: str, file: str) -> None:
    check_texts(name, kind, method, file)


def test_a_relative_directory_is_the_same_one_in_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts in --models: a name there must mean what it means here."""
    for name in ("models/sub/m", "elsewhere/m", "models/m"):
        shutil.copytree(FIXTURES / "tiny-qwen3", tmp_path / name)
    draft = shutil.copytree(FIXTURES / "tiny-qwen3-dflash", tmp_path / "models" / "draft")
    (tmp_path / "mine.yaml").write_text(json.dumps(BASE | {"target": "m", "draft": str(draft)}))
    words = ("--runtime", "vllm", "--method", "none", "--launcher", "slurm", "--models", tmp_path / "models")
    for place, expected in (
        ("models", ""), ("models/sub", "m names another directory in"), ("elsewhere", "elsewhere/m is not below")
    ):  # fmt: skip
        monkeypatch.chdir(tmp_path / place)
        source = os.path.relpath(tmp_path / "mine.yaml")
        result = run("serve-config", source, *words)
        assert expected in result.stderr
        assert (result.returncode == 0) == (not expected), result.stderr


@pytest.mark.parametrize("key", ["2", "null", "1.5", "false"])
def test_keys_that_are_no_text(key: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"max_batch_size: 4\n{key}: 3\n")
    result = run("serve-config", "--from", tmp_path / "c.yaml", "--runtime", "trtllm", "--draft", BASE["draft"])
    assert "Traceback" not in result.stderr
    assert result.returncode in (0, 1)


def test_standard_input_has_a_limit() -> None:
    result = run("serve-config", "--from", "-", "--draft", BASE["draft"], stdin=b"#" * (2**17 + 1))
    assert (result.returncode, "standard input has more than 131072 bytes" in result.stderr) == (1, True)
