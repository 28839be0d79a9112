# SPDX-License-Identifier: Apache-2.0
"""Streamed arguments of demanded calls, by the official client: joined, they are those of the whole answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dflash_trt.llm import LLM
from tests.engines import trained_engine
from tests.paths import FIXTURES
from tests.runtime.server.conftest import copy_with_template
from tests.runtime.server.live import Live, serving
from tests.runtime.server.test_tools import NAMED, SETTINGS

CASES = [
    pytest.param("required", {"max_tokens": 100}, id="required"),
    pytest.param(NAMED, {"max_tokens": 100, "stop": ["precise"]}, id="stopped"),
    *(
        pytest.param(choice, limits, id=f"{choice}, {limits}", marks=pytest.mark.full)
        for choice in ("required", NAMED)
        for limits in ({"max_tokens": 60}, {}, {"stop": ["precise"]}, {"stop": ["</tool_call>"]})
    ),
]


@pytest.fixture(scope="module", params=["tiny-gpt-oss", pytest.param("tiny-qwen3", marks=pytest.mark.full)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if request.param == "tiny-gpt-oss":
        yield request.getfixturevalue("shared")
        return
    target = copy_with_template(FIXTURES / request.param, tmp_path_factory.mktemp("target"))
    with LLM(trained_engine(request.param), target, max_batch_size=4, draft_length=7) as llm, serving(llm) as live:
        yield live


@pytest.mark.parametrize(("choice", "limits"), CASES)
def test_deltas_are_the_whole(served: Live, choice: Any, limits: dict[str, Any]) -> None:
    create = served.openai().chat.completions.create
    settings = {**SETTINGS, "tool_choice": choice, "n": 3, **limits}
    calls: list[list[list[str]]] = [[] for _ in range(3)]
    reasons, num_deltas, ids = [""] * 3, 0, set()
    for chunk in create(stream=True, **settings):
        for each in chunk.choices:
            reasons[each.index] = each.finish_reason or reasons[each.index]
            for delta in each.delta.tool_calls or []:
                assert delta.function is not None
                assert (delta.id is None) == (delta.type is None) == (delta.function.name is None)
                if delta.id is not None:
                    ids.add(delta.id)
                    calls[each.index].append([delta.function.name or "", ""])
                assert delta.index == len(calls[each.index]) - 1
                calls[each.index][-1][1] += delta.function.arguments or ""
                num_deltas += 1
    whole = create(**settings).choices
    shaped = [[[c.function.name, c.function.arguments] for c in each.message.tool_calls or []] for each in whole]
    assert calls == shaped
    assert reasons == [each.finish_reason for each in whole]
    num_calls = sum(map(len, calls))
    assert len(ids) == num_calls > 0
    assert num_deltas > 2 * num_calls
    if limits.get("stop") == ["precise"]:
        assert "stop" in reasons  # inside the arguments, so nothing is to be called
    else:
        assert set(reasons) <= {"length", "tool_calls"}
