# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.llm import LLM
from tests.engines import trained_engine
from tests.paths import FIXTURES
from tests.runtime.server.live import Live, serving

TEMPLATE = (
    "{% if tools %}# tools: {{ tools | tojson }}, called by <tool_call>\n{% endif %}"
    "{% if reasoning_effort %}# effort: {{ reasoning_effort }}{{ ', thinking' if enable_thinking }}\n{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


def copy_with_template(target: Path, into: Path) -> Path:
    """A copy of a fixture, with a chat template that takes tools and efforts."""
    directory = into / target.name
    shutil.copytree(target, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="package")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_with_template(FIXTURES / "tiny-gpt-oss", tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="package")
def engine() -> Path:
    return trained_engine("tiny-gpt-oss")


@pytest.fixture(scope="package")
def llm(engine: Path, chat_target: Path) -> Iterator[LLM]:
    # Steps are compared, and `auto` makes those depend on time.
    with LLM(engine, chat_target, max_batch_size=4, draft_length=7) as opened:
        yield opened


@pytest.fixture(scope="package")
def shared(llm: LLM) -> Iterator[Live]:
    with serving(llm) as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """Idle before and after."""
    yield shared
    shared.await_idle()
