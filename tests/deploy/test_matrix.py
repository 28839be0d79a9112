# SPDX-License-Identifier: Apache-2.0
"""Every deployment with every runtime, alone and under Dynamo: clean under its strict check, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.deploy.deployments import NAMES, RUNTIMES, resolved

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", NAMES)
def test_all_runtimes(name: str, tmp_path: Path) -> None:
    file, manifest = tmp_path / "file", tmp_path / "graph.yaml"
    for runtime in RUNTIMES:
        can_serve = runtime in resolved(name).runtimes
        if resolved(name).gpus.nodes == 1:
            result = run("serve-config", name, "--runtime", runtime, "-o", file)
            assert (result.returncode == 0) == can_serve, result.stderr
            if can_serve:
                check_strictly(name, runtime, file)
        graph = run(
            "serve-config", name, "--runtime", f"dynamo-{runtime}", "--image", "registry/image:1", "-o", manifest
        )
        assert (graph.returncode == 0) == can_serve, graph.stderr
        if can_serve:
            check_strictly(name, runtime, manifest)
        for refused in (graph, *([] if resolved(name).gpus.nodes > 1 else [result])):
            assert can_serve or f"{name} cannot be served by" in refused.stderr


def check_strictly(name: str, runtime: str, file: Path) -> None:
    checked = run("serve-config", name, "--runtime", runtime, "--check", file, "--strict")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", NAMES)
def test_triton(name: str, tmp_path: Path) -> None:
    result = run("triton-repo", name, "-o", tmp_path / "models")
    can_serve = "trtllm" in resolved(name).runtimes
    assert (result.returncode == 0) == can_serve, result.stderr
    assert can_serve or f"{name} cannot be served by TensorRT-LLM" in result.stderr
    assert (tmp_path / "models").exists() == can_serve
