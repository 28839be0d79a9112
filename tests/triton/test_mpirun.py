# SPDX-License-Identifier: Apache-2.0
"""`mpirun -n 3 tritonserver`: three real servers over real MPI, of which rank 0 answers; TensorRT-LLM is a stand-in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.commands import run_here
from tests.deploy.deployments import BUILD_CONFIGS
from tests.triton.environment import environment
from tests.triton.server import PATIENCE, Server
from tests.triton.test_trtllm import STAND_IN, WORDS

pytestmark = pytest.mark.full


def test_rank_0_answers_and_the_others_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpirun is None or find_spec("mpi4py") is None:
        pytest.skip("no mpirun and mpi4py: pip install mpi4py mpich")
    run_here("triton-repo", BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml", "-o", tmp_path / "models")
    notes = tmp_path / "notes"
    monkeypatch.setenv("STAND_IN_NOTES", str(notes))
    launcher = (mpirun, "-n", "3")
    server = Server(environment(), tmp_path / "models", tmp_path / "log", sites=(STAND_IN,), launcher=launcher)
    try:
        server.await_ready()
        made = json.loads(notes.read_text().splitlines()[0])
        assert sorted(made["workers"]) == [[1, "triton_python_b"], [2, "triton_python_b"]]
        assert server.generate({"text_input": WORDS})["text_output"] == f" {WORDS}"
        os.kill(made["server"], signal.SIGTERM)
        server.process.wait(PATIENCE)
        assert json.loads(notes.read_text().splitlines()[-1]) == {"shutdown": True}
        log = server.log.read_text(errors="replace")
        assert all(f"rank {rank}: rank 0 has ended" in log for rank in (1, 2))
        assert log.count("Started HTTPService") == 1
    finally:
        server.stop()
