# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.llm import LLM
from tests.cli.commands import run_here
from tests.engines import trained_engine
from tests.paths import FIXTURES
from tests.triton.server import Server, environment

TARGET = FIXTURES / "tiny-gpt-oss"


@pytest.fixture(scope="package")
def engine() -> Path:
    return trained_engine("tiny-gpt-oss")


@pytest.fixture(scope="package")
def repository(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slots for 32 requests at once."""
    output = tmp_path_factory.mktemp("served") / "models"
    options = ("--target", TARGET, "--runtime", "embedded", "--max-batch-size", 32)
    run_here("triton-repo", engine, *options, "-o", output)
    (settings,) = output.glob("*/1/model.yaml")
    with settings.open("a") as file:  # steps are compared, and `auto` makes those depend on time
        file.write("draft_length: 7\n")
    return output


@pytest.fixture(scope="package")
def shared_server(repository: Path) -> Iterator[Server]:
    server = Server(environment(), repository, repository.with_name("server.log"))
    try:
        server.await_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """Idle before and after, and the model process is the same."""
    before = shared_server.model_process()
    yield shared_server
    shared_server.await_reading("dflash_running_requests", 0)
    shared_server.await_reading("dflash_free_slots", 32)
    assert shared_server.model_process() == before


@pytest.fixture(scope="package")
def llm(engine: Path) -> Iterator[LLM]:
    """The engine in this process, for the expected answers."""
    with LLM(engine, TARGET, draft_length=7) as llm:
        yield llm
