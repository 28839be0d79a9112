# SPDX-License-Identifier: Apache-2.0
"""The routes of the API, and their description in OpenAPI 3.1, made from the structs of requests and answers."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from dflash_trt import __version__
from dflash_trt.api.sampling_params import SAMPLER_FIELDS
from dflash_trt.runtime.server.answer.bodies import (
    ChatCompletion,
    Completion,
    Error,
    Model,
    ModelList,
    Tokens,
    Version,
)
from dflash_trt.runtime.server.answer.responses_answer import ResponseObject
from dflash_trt.runtime.server.request.request_fields import ChatBody, CompletionBody, TokenizeBody
from dflash_trt.runtime.server.request.responses_request import ResponsesBody

Json = dict[str, Any]


class Operation(NamedTuple):
    """A route."""

    method: str
    path: str
    handler: str
    """Method of Endpoints."""
    summary: str
    answer: type[msgspec.Struct] | str
    """Struct of the answer; for one that is not JSON, its content type."""
    body: type[msgspec.Struct] | None = None
    is_streamed: bool = False
    """Whether the answer may be server-sent events."""


OPERATIONS = (
    Operation("POST", "/v1/completions", "completions", "Completes prompts.", Completion, CompletionBody, True),
    Operation("POST", "/v1/chat/completions", "chat_completions", "Answers a chat.", ChatCompletion, ChatBody, True),
    Operation(
        "POST", "/v1/responses", "responses", "Answers a chat without tools.", ResponseObject, ResponsesBody, True
    ),
    Operation("GET", "/v1/models", "models", "Names the model.", ModelList),
    Operation("GET", "/v1/models/{model}", "model", "The model, if that is its name.", Model),
    Operation("POST", "/tokenize", "tokenize", "Token ids of a prompt or a chat.", Tokens, TokenizeBody),
    Operation("GET", "/health", "health", "503 while the decoder fails.", "text/plain"),
    Operation("GET", "/version", "version", "The version of dflash-trt.", Version),
    Operation("GET", "/metrics", "metrics", "Metrics for Prometheus, under vLLM's names.", CONTENT_TYPE_LATEST),
)
PATH_PARAMETER = re.compile(r"{(\w+)}")
REFERENCE = "#/components/schemas/{name}"
LARGEST = 1e300
"""Larger bounds, which only limit the type of a number, are left out."""


def document() -> Json:
    """The description of the API."""
    structs = {kind for each in OPERATIONS for kind in (each.answer, each.body) if isinstance(kind, type)} | {Error}
    _, schemas = msgspec.json.schema_components(sorted(structs, key=lambda each: each.__name__), ref_template=REFERENCE)
    for schema in schemas.values():
        for name, number in SAMPLER_FIELDS.items():
            if (described := schema["properties"].get(name)) is not None:
                described |= _bounds(name, number.bounds.low, number.bounds.high)
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dflash-trt", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _bounds(name: str, low: float, high: float) -> Json:
    bounds = {"minimum": -1 if name == "top_k" else low, "maximum": high}  # for top_k, -1 is another word for 0
    return {word: bound for word, bound in bounds.items() if abs(bound) < LARGEST}


def _describe(operation: Operation) -> Json:
    answer = operation.answer
    content = {answer: {"schema": {"type": "string"}}} if isinstance(answer, str) else _json(answer)
    if operation.is_streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    parameters = PATH_PARAMETER.findall(operation.path)
    described: Json = {
        "operationId": operation.handler,
        "parameters": [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in parameters],
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer", "content": content}},
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body)}
        described["responses"]["default"] = {"description": "What is wrong", "content": _json(Error)}
    return described


def _json(struct: type[msgspec.Struct]) -> dict[str, Json]:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(name=struct.__name__)}}}
