# SPDX-License-Identifier: Apache-2.0
"""Calls familiar to users of vLLM, and errors for typos before the target is loaded."""

import threading
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch

import dflash_trt
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.errors import CheckpointError, RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime import load
from dflash_trt.runtime.checked_pair import default_batch_size
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.embedded_backend import EmbeddedBackend
from dflash_trt.runtime.policy.auto_length import AutoLength
from tests.checkpoint.samples import refusal
from tests.decoding import memory_of
from tests.llm.serving import LONG, PROMPTS, await_running, greedy, open_llm, within
from tests.paths import FIXTURES

TARGET = str(FIXTURES / "tiny-qwen3")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cache_gib": 1e308}, "cache_gib: expected more than 0 and at most 1048576 GiB, found 1e+308"),
        ({"cache_gib": float("nan")}, "cache_gib: expected"),
        ({"cache_gib": 0}, "cache_gib: expected"),
        ({"cache_gib": True}, "cache_gib: expected"),
        ({"cache_gib": "4"}, "cache_gib: expected"),
        ({"max_batch_size": 10**9}, "the caches of 1000000000 requests do not fit into memory"),
        ({"max_batch_size": 2**70}, "max_batch_size: expected 1 to 2^31 - 1, found"),
        ({"max_batch_size": 0}, "max_batch_size: expected 1 to 2^31 - 1, found 0"),
        ({"prefill_chunk": 2**31}, "prefill_chunk: expected 1 to 2^31 - 1, found"),
        ({"prefill_chunk": 1.5}, "prefill_chunk: expected an integer, 1 to 2^31 - 1, found 1.5"),
        ({"prefill_chunk": 0}, "prefill_chunk: expected 1 to 2^31 - 1, found 0"),
        ({"draft_length": 8}, "draft length: expected 0 to 7"),
        ({"dtype": "float16"}, "dtype: expected auto, float32 or bfloat16, found 'float16'"),
        ({"device": "tpu"}, "device: expected auto, cpu or cuda"),
    ],
)
def test_settings(settings: dict[str, Any], words: str, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(load, "load_model", too_late)
    assert words in refusal(lambda: LLM(engine, TARGET, **settings), RequestError)


@pytest.mark.parametrize("path", [3, b"engine"])
def test_paths(path: Any, engine: Path) -> None:
    assert "engine: expected a path" in refusal(lambda: LLM(path, TARGET), RequestError)
    assert "target: expected a path" in refusal(lambda: LLM(engine, path), RequestError)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "def f("}]


def test_the_package_lists_its_api() -> None:
    assert dir(dflash_trt) == [
        "Chunk", "Completion", "DFlashError", "Grammar", "LLM", "RequestError", "SamplingParams", "__version__",
        "spec_generate",
    ]  # fmt: skip
    assert issubclass(RequestError, dflash_trt.DFlashError)
    assert all(getattr(dflash_trt, name) for name in dir(dflash_trt))


@pytest.mark.parametrize(
    "prompt",
    [(5, 6, 7), np.array([5, 6, 7]), np.array([5, 6, 7], dtype=np.uint8), torch.tensor([5, 6, 7]), [np.int64(5), 6, 7]],
    ids=lambda prompt: type(prompt).__name__,
)
def test_token_ids_come_as_users_have_them(llm: LLM, prompt: Any) -> None:
    one = within(lambda: llm.generate(prompt, greedy(4))[0])
    assert one.token_ids == within(lambda: llm.generate([5, 6, 7], greedy(4))[0]).token_ids
    assert [same.token_ids for same in within(lambda: llm.generate([prompt], greedy(4)))] == [one.token_ids]
    *_, last = within(lambda: list(llm.stream(prompt, greedy(4))))
    assert last.completion is not None
    assert last.completion.token_ids == one.token_ids


@pytest.mark.parametrize(
    "prompt", [b"def f", 5, None, 1.5, {"text": "a"}, np.array(5), np.array([[5, 6]]), np.array([1.5]), ["a", 5]],
    ids=repr,
)  # fmt: skip
def test_what_is_no_prompt_is_refused_for_that_request_alone(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt: expected (a text or a list of )?token ids"):
        llm.generate(prompt, greedy(3))
    assert len(within(lambda: llm.generate([5, 6], greedy(3))[0]).token_ids) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 3.5}, "max_tokens: expected an integer, at least 1, found 3.5"),
        ({"max_tokens": True}, "max_tokens: expected an integer, at least 1, found True"),
        ({"max_tokens": None}, "max_tokens: expected an integer, at least 1, found None"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, found 0"),
        ({"temperature": "a"}, "temperature: expected a number, 0 or more, found 'a'"),
        ({"temperature": float("nan")}, "temperature: expected 0 or more, found nan"),
        ({"temperature": 10**400}, "temperature: expected 0 or more, found 1000"),
        ({"temperature": True}, "temperature: expected a number, 0 or more, found True"),
        ({"top_k": -2}, "top_k: expected 0 to 2^31 - 1, or -1, found -2"),
        ({"top_p": float("nan")}, "top_p: expected more than 0 and at most 1, found nan"),
        ({"min_p": "0.5"}, "min_p: expected a number, 0 to 1, found '0.5'"),
        ({"seed": 1.0}, "seed: expected an integer, 0 to 2^64 - 1, found 1.0"),
        ({"stop": b"x"}, "stop: expected a text of at least one character, or a list of them, found b'x'"),
        ({"stop": ["a", ""]}, "stop: expected a text of at least one character, or a list of them, found ['a', '']"),
        ({"stop": [1]}, "stop: expected a text of at least one character, or a list of them, found [1]"),
        ({"stop_token_ids": "a"}, "stop_token_ids: expected a token id, or a list of them, found 'a'"),
        ({"stop_token_ids": [True]}, "stop_token_ids: expected a token id, or a list of them, found [True]"),
        ({"ignore_eos": 1}, "ignore_eos: expected True or False, found 1"),
        ({"logprobs": 21}, "top_logprobs: expected 0 to 20, found 21"),
        ({"logprobs": "a"}, "logprobs: expected True or False, found 'a'"),
        ({"logprobs": 5, "prompt_logprobs": 2}, "prompt_logprobs: expected True, or top_logprobs, which is 5, found 2"),
        ({"n": 0}, "n: expected 1 to 16384, found 0"),
        ({"n": 10**9}, "n: expected 1 to 16384, found 1000000000"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_settings_of_a_wrong_type_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**settings)
    assert refused.value.message.startswith(message)


def test_settings_come_as_users_have_them() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=1, top_k=-1, stop="end", stop_token_ids=7, seed=np.uint64(5)
    )
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (3, 1.0, 0, 5)
    assert (params.stop, params.stop_token_ids) == (("end",), frozenset([7]))
    assert SamplingParams(stop={"b", "a"}).stop == SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    for ids in ([7, 8], (7, 8), {7, 8}, np.array([7, 8])):
        assert SamplingParams(stop_token_ids=ids).stop_token_ids == frozenset([7, 8])
    assert SamplingParams(stop=None, stop_token_ids=None, logprobs=None) == SamplingParams()


def test_what_is_no_settings_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="max_token: there is no such setting"):
        SamplingParams(max_token=2)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="sampling_params: expected SamplingParams, found 64"):
        llm.generate(PROMPTS[0], 64)  # type: ignore[arg-type]


NO_CONVERSATIONS = ["hello", [], [{}], ["hello"], [{"role": "user"}], [{"role": "user", "content": 5}]]


@pytest.mark.parametrize(
    ("messages", "template", "words"),
    [
        *((messages, TEMPLATE, "messages: expected") for messages in NO_CONVERSATIONS),
        (MESSAGES, "{{ raise_exception('roles must alternate') }}",
         r"messages\[0\]: expected what the chat template.*roles must alter"),
        (MESSAGES, None, "expected a tokenizer with a chat template, found none"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused(
    llm: LLM, messages: Any, template: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.backend.session.tokenizer, "chat_template", template)
    with pytest.raises(RequestError, match=words):
        llm.chat(messages)


def test_a_request_drafts_what_it_asks_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoLength, "choose", lambda *_: 0)
    for asked, least in ((None, 0), (0, 0), (3, 3), (7, 7)):
        answer = within(lambda asked=asked: llm.generate(PROMPTS[0], greedy(32, draft_length=asked))[0])
        acceptance = answer.acceptance
        assert acceptance is not None
        assert len(acceptance.accepted_by_position) <= least
        assert (acceptance.proposed > 0) == (least > 0)


def test_draft_lengths_are_numbers_too(engine: Path) -> None:
    for length in (0, "3"):
        with open_llm(engine, draft_length=length) as llm:
            drafter = llm.backend.session.drafter
            with patch.object(drafter, "inject", wraps=drafter.inject) as inject:
                answer = within(lambda llm=llm: llm.generate(PROMPTS[0], greedy(12))[0])
            assert answer.acceptance is not None
            assert (answer.acceptance.proposed == 0) == (length == 0)
            assert answer.acceptance.proposed <= int(length) * answer.acceptance.passes
            assert inject.called == (length != 0), "plain decoding needs no drafter"
    for wrong in (8, -1, 1.5, True, "x"):
        with pytest.raises(RequestError, match="draft length: expected 0 to 7"):
            open_llm(engine, draft_length=wrong)


def test_a_batch_is_what_the_plans_hold(engine: Path) -> None:
    manifest = read_manifest(engine)
    assert default_batch_size(manifest) == 16
    assert default_batch_size(msgspec.structs.replace(manifest, plan_options=PlanOptions(max_batch_size=9))) == 9
    with LLM(engine, FIXTURES / "tiny-qwen3") as llm:
        assert llm.metrics().free_slots == 16


def running(engine: Path, executor: str) -> tuple[LLM, list[weakref.ref[Any]]]:
    """An LLM in the middle of a request, and what its end frees."""
    llm = open_llm(engine, executor=executor)
    backend = llm.backend
    assert isinstance(backend, EmbeddedBackend)
    backend.submit(backend.request(PROMPTS[0], LONG, lambda chunk: None))
    await_running(llm)
    return llm, [weakref.ref(llm.backend.decoder.runner), *memory_of(llm.backend.session)]


@pytest.mark.parametrize("executor", ["onnxruntime", "torch"])
def test_an_end_frees_both_models_at_once(executor: str, engine: Path, uncollected: None) -> None:
    """An error ends a `with`, while both the LLM and the error stay."""
    llm, watched = running(engine, executor)

    def fail() -> None:
        with llm:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as error:
        fail()
    assert error.value.__traceback__ is not None
    assert [found() for found in watched] == [None] * len(watched)
    assert (llm.metrics().running, llm.metrics().passes > 0) == (0, True)
    within(llm.close)


def test_without_a_target_the_drafter_goes(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    closed: list[Drafter] = []
    monkeypatch.setattr(Drafter, "close", lambda drafter: closed.append(drafter))
    monkeypatch.setattr(load, "load_model", too_large)
    assert "does not fit into the GPU's memory" in refusal(lambda: open_llm(engine), CheckpointError)
    assert len(closed) == 1


def test_dropping_the_last_reference_ends_thread_and_models(engine: Path, uncollected: None) -> None:
    others = {*threading.enumerate()}
    llm, watched = running(engine, "onnxruntime")
    watched = [weakref.ref(llm), *watched]
    (thread,) = (thread for thread in threading.enumerate() if thread not in others and "decoder" in thread.name)
    del llm
    assert [found() for found in watched] == [None] * len(watched)
    assert thread not in threading.enumerate()
