# SPDX-License-Identifier: Apache-2.0
"""The description of the API is valid, complete and true."""

from __future__ import annotations

from typing import Any

import pytest
from openapi_spec_validator import validate

from dflash_trt.runtime.server.openapi import OPERATIONS, document
from tests.runtime.server.live import MODEL, Live

PATHS = {"CompletionBody": "/v1/completions", "ChatBody": "/v1/chat/completions", "TokenizeBody": "/tokenize"}
SCHEMAS = document()["components"]["schemas"]


def sample(schema: dict[str, Any]) -> Any:
    """A value that fits a schema: its first alternative, with a field of every object that requires one."""
    if "$ref" in schema:
        return sample(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return sample(schema["anyOf"][0] | {key: schema[key] for key in ("minimum", "maximum") if key in schema})
    if "enum" in schema or "const" in schema:
        return schema.get("enum", [schema.get("const")])[0]
    kind = schema["type"]
    if kind == "array":
        return [sample(schema["items"])]
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: sample(properties[name]) for name in schema.get("required") or [*properties][:1]}
    values = {"string": "x", "boolean": True, "number": 0.5, "integer": 1}
    return max(values[kind], schema["minimum"]) if "minimum" in schema else values[kind]


def test_it_is_valid_and_has_every_route(live: Live) -> None:
    served = live.http.get("/openapi.json").json()
    validate(served)
    assert {(path, method) for path, methods in served["paths"].items() for method in methods} == {
        (each.path, each.method.lower()) for each in OPERATIONS
    }
    for each in OPERATIONS:
        path = each.path.format(model=MODEL)
        assert live.http.request("PUT", path).status_code == 405
        if each.method == "GET":
            answer = live.http.get(path)
            assert answer.status_code == 200
            (kind,) = served["paths"][each.path]["get"]["responses"]["200"]["content"]
            assert answer.headers.get("content-type", kind).startswith(kind.partition(";")[0])


@pytest.mark.parametrize("title", PATHS)
def test_what_it_describes_is_accepted(live: Live, title: str) -> None:
    """Each field alone, beside those that are required."""
    schema = SCHEMAS[title]
    required = {"prompt": "x"} if title == "TokenizeBody" else sample(schema) | {"max_tokens": 2}
    for name, described in schema["properties"].items():
        fields = {name: MODEL if name == "model" else sample(described)}
        if name == "messages":
            fields["prompt"] = None
        fields |= {"stream": True} if name == "stream_options" else {}
        fields |= {"logprobs": True} if name == "top_logprobs" else {}
        response = live.post(PATHS[title], **required | fields)
        assert response.status_code == 200, (name, response.text)


def test_answers_have_the_fields_that_it_describes(live: Live) -> None:
    def check(value: Any, schema: dict[str, Any]) -> None:
        if "$ref" in schema:
            check(value, SCHEMAS[schema["$ref"].rpartition("/")[2]])
        elif "anyOf" in schema and value is not None:
            check(value, schema["anyOf"][0])
        elif schema.get("type") == "array" and value is not None:
            for item in value:
                check(item, schema["items"])
        elif "properties" in schema:
            assert set(schema.get("required", [])) <= value.keys() <= schema["properties"].keys()
            for name, item in value.items():
                check(item, schema["properties"][name])

    settings = {"max_tokens": 4, "return_steps": True}
    check(live.complete(prompt="x", logprobs=2, echo=True, **settings), SCHEMAS["Completion"])
    for event in live.events(prompt="x", stream_options={"include_usage": True}, **settings):
        check(event, SCHEMAS["Completion"])
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, **settings}
    check(live.post("/v1/chat/completions", **chat).json(), SCHEMAS["ChatCompletion"])
    for event in live.events("/v1/chat/completions", **chat):
        check(event, SCHEMAS["ChatCompletion"])
    check(live.post(prompt=7).json(), SCHEMAS["Error"])
    check(live.http.get("/v1/models").json(), SCHEMAS["ModelList"])


def test_the_page_needs_no_other_host(live: Live) -> None:
    page = live.http.get("/docs")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "://" not in page.text
    for name in ("docs.js", "docs.css", "page.css"):
        assert f'"page/{name}"' in page.text
        assert live.http.get(f"/page/{name}").status_code == 200
