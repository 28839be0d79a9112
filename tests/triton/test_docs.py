# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/serve.md about Triton do what they say, against a running server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.llm import LLM
from dflash_trt.triton.tensors import INPUTS, OUTPUTS
from tests.paths import REPOSITORY
from tests.triton.server import PATIENCE, Server

TEXT = (REPOSITORY / "docs" / "serve.md").read_text().partition("## Triton Inference Server\n")[2]
COUNTS = re.search(r"(\d+) inputs, (\d+) outputs", TEXT)


def blocks(language: str, server: Server) -> list[str]:
    """The page's code blocks of a language, with this server's ports."""
    ports = {"8000": server.http, "8001": server.grpc, "8002": server.prometheus}
    found = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return [re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda match: str(ports[match[0]]), block) for block in found]


def test_the_python_client(server: Server, llm: LLM) -> None:
    (script,) = blocks("python", server)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert result.returncode == 0, result.stderr
    expected = llm.generate("def quicksort(", SamplingParams(max_tokens=64))[0]
    assert expected.tau is not None
    text, _, length = result.stdout.rpartition("\nacceptance length ")
    assert text.endswith(expected.text)
    assert float(length) == pytest.approx(expected.tau)
    assert result.stdout.count("\n") > 4


def test_the_curl_lines(server: Server) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    lines = [line for block in blocks("sh", server) for line in block.splitlines() if line.startswith("curl")]
    assert len(lines) == 3
    for line in lines:
        command = ["sh", "-c", line]
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert result.returncode == 0, line
        assert "ready" in line or "dflash_output_tokens" in result.stdout or "data: {" in result.stdout, line


def test_the_server_commands_are_those_that_are_printed(server: Server) -> None:
    from dflash_trt.triton.repository import server_command
    from tests.triton.server import LOOPBACK

    command = " ".join(server_command("models", LOOPBACK))  # type: ignore[arg-type]
    assert f"\n{command}\n" in TEXT
    assert f"\nmpirun -n 8 {command}\n" in TEXT


def test_the_counts() -> None:
    assert COUNTS is not None
    assert (int(COUNTS[1]), int(COUNTS[2])) == (len(INPUTS), len(OUTPUTS))
    for spec in (*INPUTS, *OUTPUTS):
        short = spec.name.removeprefix("sampling_param")
        assert spec.name in TEXT or f"`{short}`" in TEXT or spec.name.startswith("kv_cache_"), spec.name
