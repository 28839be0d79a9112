# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.llm import LLM
from tests.engines import trained_engine
from tests.llm.serving import await_idle, open_llm


@pytest.fixture(scope="package")
def engine() -> Path:
    return trained_engine("tiny-qwen3")


@pytest.fixture(scope="package")
def shared_llm(engine: Path) -> Iterator[LLM]:
    with open_llm(engine) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Idle before and after."""
    yield shared_llm
    await_idle(shared_llm)


@pytest.fixture
def own_llm(engine: Path) -> Iterator[LLM]:
    """For tests that break it; it always drafts, so that what drafting calls is called."""
    with open_llm(engine, draft_length=7) as llm:
        yield llm
