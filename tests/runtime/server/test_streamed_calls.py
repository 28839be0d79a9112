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


def test_events_of_a_response(served: Live) -> None:
    """Each call is an item, whose arguments come in deltas."""
    (tool, *_) = SETTINGS["tools"]
    settings: Any = {"model": SETTINGS["model"], "input": "x", "tools": [{"type": "function", **tool["function"]}]}
    settings |= {"tool_choice": "required", "extra_body": {"seed": 4}, "max_output_tokens": 80}
    client = served.openai()
    events = list(client.responses.create(stream=True, **settings))
    items = [item for item in client.responses.create(**settings).output if item.type == "function_call"]
    assert items
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    places = [i for i, item in enumerate(events[-1].response.output) if item.type == "function_call"]  # type: ignore[union-attr]
    texts = ["".join(delta.delta for delta in deltas if delta.output_index == place) for place in places]
    assert texts == [item.arguments for item in items]
    assert len(deltas) > 2 * len(items)
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert done == texts
