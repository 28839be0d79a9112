# SPDX-License-Identifier: Apache-2.0
"""Engine mode on several MPI ranks: all of them have our drafter, and all propose the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_trt.deploy.trtllm_arguments import ENGINE_MODE
from dflash_trt.errors import EngineError
from dflash_trt.trtllm.start import MODULE, check_start
from tests.engines import build
from tests.paths import FIXTURES, REPOSITORY
from tests.trtllm.fake_package import write_launcher, write_package, write_server
from tests.trtllm.pool_schedule import open_setup

MPIEXEC = [f"{sys.prefix}/bin/mpiexec", "-n"]
SCRIPT = [sys.executable, "-m", "mpi4py", "-m"]
"""A rank that fails ends the others."""
OURS = "dflash_trt.trtllm.registration"


def run(command: list[str], path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def gathered(num_ranks: int, *arguments: str) -> list[Any]:
    """What the ranks of rank_script.py print."""
    result = run([*MPIEXEC, str(num_ranks), *SCRIPT, "tests.trtllm.rank_script", *arguments])
    assert result.returncode == 0, result.stderr
    ranks: list[Any] = json.loads(result.stdout)
    assert len(ranks) == num_ranks
    assert all(rank == ranks[0] for rank in ranks)
    return ranks


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_all_ranks_propose_the_same_tokens(tmp_path: Path, num_ranks: int) -> None:
    target = FIXTURES / "tiny-gpt-oss"
    build(FIXTURES / "tiny-gpt-oss-dflash", tmp_path / "engine", target)
    for drafts, expected in gathered(num_ranks, "whole", str(tmp_path / "engine"), str(target))[0]:
        assert drafts == expected
        assert len(drafts) > 1


@pytest.mark.parametrize("how", ["pooled", "shared"])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(8, marks=pytest.mark.full)])
def test_ranks_with_pools_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, num_ranks: int
) -> None:
    """Pages lie elsewhere on each; with all heads or their share, ranks propose what one with a dense cache does."""
    open_setup(tmp_path / "engine", monkeypatch, *([num_ranks] if how == "shared" else []))
    drafts, expected = gathered(num_ranks, how, str(tmp_path / "engine"))[0]
    assert len(drafts) > 10
    assert drafts == expected


@pytest.mark.parametrize("command", ["trtllm-serve", "dynamo.trtllm"])
def test_spawned_ranks_register_the_drafter(tmp_path: Path, command: str) -> None:
    """mpi4py imports the main module into the ranks it spawns; with the console script alone they would not know us."""
    write_server(write_package(tmp_path))
    serve = [*ENGINE_MODE[1:], command, "MODEL", "--config", "FILE"]
    result = run([*MPIEXEC, "1", sys.executable, *serve], tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [OURS, OURS, OURS, command, "MODEL", "--config", "FILE"]


@pytest.mark.full
def test_ranks_of_the_launcher_register_the_drafter(tmp_path: Path) -> None:
    """Two MPI ranks under trtllm-llmapi-launch: both have our drafter, and propose the same tokens with it."""
    target = FIXTURES / "tiny-gpt-oss"
    build(FIXTURES / "tiny-gpt-oss-dflash", tmp_path / "engine", target)
    launch = write_launcher(write_package(tmp_path))
    models = [str(tmp_path / "engine"), str(target)]
    serve = [sys.executable, *ENGINE_MODE[1:], "trtllm-serve", *models]
    result = run([*MPIEXEC, "2", "bash", str(launch), *serve], tmp_path)
    assert result.returncode == 0, result.stderr
    (first, drafts), (second, other_drafts) = json.loads(result.stdout)
    assert (first, second) == (OURS, OURS)
    assert drafts == other_drafts
    assert all(proposed == expected for proposed, expected in drafts)
    # With the console script in the place of our module both would have TensorRT-LLM's.
    script = "from tensorrt_llm.commands import main; main()"
    without = run([*MPIEXEC, "2", "bash", str(launch), sys.executable, "-c", script, *models], tmp_path)
    assert [name for name, _ in json.loads(without.stdout)] == ["tensorrt_llm._torch.models.modeling_dflash"] * 2


def test_a_launcher_that_sends_tasks_otherwise(tmp_path: Path) -> None:
    write_launcher(write_package(tmp_path))
    session = tmp_path / "tensorrt_llm" / "llmapi" / "mpi_session.py"
    session.write_text(session.read_text().replace("def submit(self, task,", "def submit(self, work,"))
    script = "from dflash_trt.trtllm.start import register_in_remote_ranks as r; r()"
    refused = run([sys.executable, "-c", script], tmp_path)
    assert "submit: expected (self, task, *args, ...), found (self, work, args" in refused.stderr


def test_a_start_that_cannot_work(tmp_path: Path) -> None:
    without = run([sys.executable, *ENGINE_MODE[1:], "trtllm-serve"])
    assert (without.returncode, without.stdout) == (1, "")
    assert without.stderr.startswith("error: engine mode: expected tensorrt_llm")
    unknown = run([sys.executable, *ENGINE_MODE[1:], "no-such-script"], write_package(tmp_path))
    assert unknown.returncode == 1
    said, usage = unknown.stderr.splitlines()
    assert said == "dflash-trt: drafter registered in TensorRT-LLM 1.4.0rc1"
    assert usage.startswith("usage: python -m dflash_trt.trtllm trtllm-serve|")


def test_a_main_module_that_ranks_would_not_learn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="registers the drafter in every rank") as refused:
        check_start()
    assert str(refused.value.hint).startswith(f"python -m {MODULE} dflash-trt ")
    main = ModuleType("__main__")
    main.__spec__ = type("Spec", (), {"name": f"{MODULE}.__main__"})()
    monkeypatch.setitem(sys.modules, "__main__", main)
    check_start()
