# SPDX-License-Identifier: Apache-2.0
"""Structured outputs match, and a grammar that is slow to compile delays only its own client."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import resource
from collections.abc import Callable
from typing import Any

import jsonschema
import pydantic
import pytest

from dflash_trt.api.sampling_params import Grammar, SamplingParams
from dflash_trt.errors import DFlashError, RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime.logits_processors import GrammarCompiler, read_vocabulary
from dflash_trt.runtime.server import grammar_worker, grammars
from dflash_trt.runtime.server.grammar_fields import bounded as bounded_grammar
from dflash_trt.runtime.server.grammar_fields import read_grammar
from dflash_trt.runtime.server.grammars import MAX_COMPILING, MAX_COMPILING_PER_CLIENT, GrammarProcesses
from dflash_trt.runtime.server.http_error import HttpError
from tests.runtime.server.live import MODEL, Live, bounded
from tests.waiting import PATIENCE

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["class", "def"]}, "size": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
CHOICES = ['say "no"', "back\\slash", "line\nbreak", "[a-z]*", "é€😀", "\x00"]
MESSAGES: Any = [{"role": "user", "content": "x"}]
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "schema"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "schema"),
    ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, "[0-9]{3}-[a-z]{2}"),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "a|b"),
    ({"structured_outputs": {"choice": CHOICES}}, "|".join(map(re.escape, CHOICES))),
    ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "<x>"}}}, "<x>"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "pattern"), FIELDS, ids=lambda value: str(value)[:40])
def test_answers_match(live: Live, fields: dict[str, Any], pattern: str) -> None:
    settings = {"prompt": "def f(", "max_tokens": 200, "seed": 5, **fields}
    whole = live.complete(**settings)["choices"][0]
    assert whole["finish_reason"] == "stop"
    if pattern == "schema":
        jsonschema.validate(json.loads(whole["text"]), SCHEMA)
    else:
        assert re.fullmatch(pattern, whole["text"])
    streamed = "".join(event["choices"][0]["text"] for event in live.events(**settings))
    plain = live.complete(draft_length=0, **settings)["choices"][0]["text"]
    assert whole["text"] == streamed == plain


def test_each_choice_is_taken_as_it_is(compiler: GrammarCompiler, llm: LLM) -> None:
    for text in CHOICES:
        guided = compiler.processor(read_grammar({"structured_outputs": {"choice": [text]}}))
        guided.advance([*llm.backend.encode(text), 0])
        assert guided._matcher.is_terminated(), text


def test_the_client_parses_its_own_class(live: Live) -> None:
    class Answer(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        is_public: bool

    answer = live.openai().chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Answer, temperature=0, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


def test_a_json_object(live: Live) -> None:
    response = live.post(
        prompt="x", max_tokens=300, seed=4, response_format={"type": "json_object"}, logit_bias={"5": 0}
    )
    choice = response.json()["choices"][0]
    assert choice["text"].startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["text"]), dict)


def test_limits_leave_room_for_honest_grammars() -> None:
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        nested = {"type": "object", "properties": {"a": nested}}
    assert read_grammar({"structured_outputs": {"json": nested}}) is not None
    for _ in range(400):
        nested = {"type": "object", "properties": {"a": nested}}
    for fields in ({"structured_outputs": {"json": nested}}, {"structured_outputs": {"regex": "(" * 17}}):
        with pytest.raises(RequestError, match="of brackets"):
            read_grammar(fields)
    with pytest.raises(RequestError, match="ignore_eos: expected False"):
        SamplingParams(
            structured_outputs=bounded_grammar(read_grammar({"structured_outputs": {"regex": "a"}})), ignore_eos=True
        )  # type: ignore[arg-type]


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def endless(number: int) -> Grammar:
    """Compiling takes 50 s with 2,000 items, and more than twice as long with 4,000."""
    return regex("a?" * (20_000 + number))


@pytest.fixture
def compiler(llm: LLM) -> GrammarCompiler:
    """A compiler that has kept nothing yet."""
    return GrammarCompiler(llm.backend.tokenizer, 1024, {0})


@pytest.fixture
def processes(compiler: GrammarCompiler) -> GrammarProcesses:
    return GrammarProcesses(lambda: compiler)


@pytest.fixture(autouse=True)
def limit_seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how long a grammar may compile: first, as long as it takes a busy machine."""

    def limit(seconds: float) -> None:
        monkeypatch.setattr(grammar_worker, "COMPILE_SECONDS", seconds)

    limit(PATIENCE)
    return limit


async def active(processes: GrammarProcesses, number: int) -> None:
    """Waits until that number of grammars compile."""
    while processes.num_active < number:
        await asyncio.sleep(0)


async def cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def workers(processes: GrammarProcesses) -> list[Any]:
    return [place.worker for place in processes.places if place.worker is not None]


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
KINDS = [
    regex("[a-z]{3}"),
    Grammar(kind="json_schema", text='{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    Grammar(kind="grammar", text='root ::= "a" root | "b"'),
    Grammar(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": TAG})),
]


@bounded
async def test_another_process_compiles_the_same(processes: GrammarProcesses, llm: LLM) -> None:
    own = GrammarCompiler(llm.backend.tokenizer, 1024, {0})
    for grammar in KINDS:
        compiled = await processes.compile(grammar)
        assert compiled.serialize_json() == own.compile(grammar).serialize_json()
        assert await processes.compile(grammar) is compiled
    with pytest.raises(RequestError, match=r"a: expected a regex that compiles, found: .*Unclosed '\['"):
        await processes.compile(Grammar(kind="regex", text="[a", field="a"))


@bounded
async def test_the_first_grammar_finds_its_process(compiler: GrammarCompiler) -> None:
    """It was prepared once, although the client that first asked for it had left."""
    opened: list[GrammarCompiler] = []

    def open_compiler() -> GrammarCompiler:
        opened.append(compiler)
        return compiler

    processes = GrammarProcesses(open_compiler)
    early = asyncio.create_task(processes.compile(KINDS[0]))
    while not opened:
        await asyncio.sleep(0)
    early.cancel()
    await processes.prepare()
    (worker,) = workers(processes)
    niceness = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, worker._process.pid or 0)]
    assert niceness[1] == min(19, niceness[0] + grammar_worker.NICENESS)
    await processes.compile(KINDS[0])
    assert workers(processes) == [worker]
    assert len(opened) == 1


@bounded
async def test_grammars_that_never_end(processes: GrammarProcesses, limit_seconds: Callable[[float], None]) -> None:
    await processes.compile(KINDS[0])
    limit_seconds(0.1)
    for i in range(MAX_COMPILING + 1):
        with pytest.raises(RequestError, match=r"expected a regex that compiles within 0\.1 s"):
            await processes.compile(endless(i))
    limit_seconds(PATIENCE)
    hostile = [asyncio.create_task(processes.compile(endless(i), "a")) for i in range(2 * MAX_COMPILING)]
    await active(processes, MAX_COMPILING_PER_CLIENT)
    await processes.compile(regex("[a-z]{4}"), "b")
    started = workers(processes)
    await cancelled(hostile)
    assert processes.num_active == 0
    await processes.compile(regex("[a-z]{5}"), "a")
    while sum(worker.is_alive for worker in started) > 1:  # the one that compiled for b
        await asyncio.sleep(0.01)


@bounded
async def test_no_place_becomes_free(processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "PLACE_SECONDS", 0.1)
    hostile = [asyncio.create_task(processes.compile(endless(i), str(i))) for i in range(MAX_COMPILING)]
    await active(processes, MAX_COMPILING)
    with pytest.raises(HttpError, match="4 grammars are being compiled") as refusal:
        await processes.compile(KINDS[0], "b")
    assert refusal.value.status == 429
    monkeypatch.setattr(grammars, "PLACE_SECONDS", PATIENCE)
    await cancelled(hostile)
    await processes.compile(KINDS[0], "b")


@bounded
async def test_a_grammar_that_takes_all_memory(processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_worker, "COMPILE_BYTES", 2**24)
    with pytest.raises(RequestError, match="expected a regex that compiles in at most 16 MiB"):
        await processes.compile(endless(0))
    await processes.compile(KINDS[0])


@bounded
async def test_a_process_that_ends(processes: GrammarProcesses, compiler: GrammarCompiler) -> None:
    """By the kernel where memory is short, and by a service manager that ends all processes of the server's."""
    await processes.compile(KINDS[0])
    (worker,) = workers(processes)
    task = asyncio.create_task(processes.compile(endless(0)))
    await active(processes, 1)
    worker.kill()
    with pytest.raises(RequestError, match="expected a regex that compiles without ending the compiler"):
        await task
    await processes.compile(KINDS[1])
    task = asyncio.create_task(processes.compile(endless(1)))
    await active(processes, 1)
    await asyncio.sleep(0.1)  # it has begun
    for child in multiprocessing.active_children():
        child.terminate()
    with pytest.raises(HttpError, match="the process that compiles grammars was ended") as refusal:
        await task
    assert refusal.value.status == 503
    await processes.compile(KINDS[3])
    for waiting in workers(processes):
        waiting.kill()
    while any(worker.is_alive for worker in workers(processes)):
        await asyncio.sleep(0.01)
    await processes.compile(KINDS[2])


@bounded
async def test_a_process_that_does_not_start(processes: GrammarProcesses) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(DFlashError, match=r"grammars to start, found: .*Too many open"):
            await processes.compile(KINDS[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await processes.compile(KINDS[0])


@bounded
async def test_the_end_of_the_drain(processes: GrammarProcesses) -> None:
    await processes.compile(KINDS[0])
    task = asyncio.create_task(processes.compile(endless(0)))
    await active(processes, 1)
    processes.close()
    for late in (task, processes.compile(KINDS[1])):
        with pytest.raises(HttpError, match="the server is shutting down"):
            await late


def test_a_grammar_that_is_large_when_compiled(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_worker, "MAX_COMPILED_BYTES", 2**10)
    compile_with = read_vocabulary(compiler.vocabulary)
    assert isinstance(grammar_worker._compile(compile_with, KINDS[2], 2**30), str)
    refusal = grammar_worker._compile(compile_with, KINDS[1], 2**30)
    assert isinstance(refusal, RequestError)
    assert "expected a json_schema that compiles in at most 1024 MiB" in refusal.message
