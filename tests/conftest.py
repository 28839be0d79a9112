# SPDX-License-Identifier: Apache-2.0
"""Fixtures and settings of every test."""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from dflash_trt.runtime.session import Session

# Before anything imports torch or huggingface_hub; subprocesses inherit both.
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs the network, and none may reach for it
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its processes; tables are as in a pipe
os.environ.setdefault("OMP_NUM_THREADS", "1")  # barriers among oversubscribed threads cost more than they gain
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; tests send Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup; tests hang up on what they start
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Keep bytecode, whatever the shell says: tests start hundreds of processes, each of which would compile the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # modules and tests are made to stay
slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
settings.register_profile("busy", deadline=None, suppress_health_check=slow)  # no example fails by the clock
settings.load_profile("busy")
DEFAULT_MARKS = "not full and not gpu"  # pyproject.toml's -m
SLOW_MODULE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(full|gpu)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a module whose tests the default run deselects; pytest does not ask about files in arguments."""
    if config.option.markexpr != DEFAULT_MARKS or collection_path.suffix != ".py":
        return None
    return bool(SLOW_MODULE.search(collection_path.read_text())) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Compile another part of the test modules first in each worker; each then finds what the others compiled."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if not worker or session.config.args != session.config.getini("testpaths"):
        return
    found = sorted(Path(__file__).parent.rglob("test_*.py"))
    modules = [file for file in found if not pytest_ignore_collect(file, session.config)]
    for file in modules[int(worker.removeprefix("gw")) :: count]:
        with suppress(Exception, pytest.skip.Exception):  # collection says what is wrong
            import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """In a worker, leave all that was imported and collected out of garbage collection, to the end."""
    gc.enable()
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise nanobind reports leaks


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Runs without Python's garbage collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    """A small random gpt-oss draft: three layers, taps 1, 2 and 3, vocabulary 96, block 6, YaRN, BF16."""
    from tests.reference.synthetic import write_random_draft

    return write_random_draft(tmp_path / "draft", dialect="gpt_oss")


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    """A target with the facts that `draft_dir` demands, and of its weights the embedding only."""
    from tests.checkpoint.samples import write_target

    return write_target(tmp_path / "target")


@pytest.fixture(scope="session")
def sessions() -> dict[str, Session]:
    """Both trained pairs, built and loaded once."""
    from tests.decoding import open_trained
    from tests.fixtures_data import PAIRS

    return {name: open_trained(name, max_batch_size=1) for name in PAIRS}


@pytest.fixture(scope="session")
def features(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three prompts answered with 40 tokens each, captured once from both fixture targets."""
    from tests.fixtures_data import PAIRS
    from tests.runtime.measure.feature_samples import capture

    directory = tmp_path_factory.mktemp("features")
    options = ("--max-prompts", 3, "--max-tokens", 40)
    return {name: capture(name, directory / f"{name}.safetensors", *options) for name in PAIRS}
