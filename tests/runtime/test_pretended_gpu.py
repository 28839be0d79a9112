# SPDX-License-Identifier: Apache-2.0
"""Decoding on a GPU that is pretended: devices, waits, the order of streams, and the memory of graphs.

The drafter is torch's with our kernels, whose references compute; both models are recorded where they can be.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_trt import _C
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.device.launcher import CudaLauncher
from dflash_trt.engine.proposals import Proposals
from dflash_trt.engine.signatures import num_pages_for
from dflash_trt.errors import CheckpointError, RequestError
from dflash_trt.runtime import accept, load
from dflash_trt.runtime.accept import accept_parts
from dflash_trt.runtime.kvcache import context_cache
from dflash_trt.runtime.load import prepare_target, room_for
from dflash_trt.runtime.logits_processors import LogitBias
from dflash_trt.runtime.ranks.roles import ALONE
from dflash_trt.runtime.request import Request, append_all
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.step_input import NO_PROPOSALS, StepInput
from dflash_trt.runtime.targets.huggingface import load_model
from dflash_trt.runtime.targets.packed_pass import GatheredPass
from dflash_trt.runtime.targets.packed_target import TORCH_OPERATORS
from tests.contract.cuda_graphs import PretendGpu, RecordedGraph, pretended_gpu
from tests.decoding import greedy, memory_of, open_trained
from tests.engines import build
from tests.fixtures_data import prompts
from tests.paths import FIXTURES

STEP = ["tolist", "cpu"]
"""Waits of a step: for what the drafter proposes, and for what the target says of it."""


def open_on_gpu(name: str, dtype: str = "auto", engine: Path | None = None) -> Session:
    return open_trained(name, engine, device="cuda", executor="torch", max_batch_size=2, dtype=dtype)


def is_recorded(session: Session) -> bool:
    return session.target.summary.endswith(", CUDA graphs")


def decode(
    gpu: PretendGpu, session: Session, prompt: list[int], params: SamplingParams
) -> tuple[list[int], list[list[str]]]:
    """The answer, and what the host waited for, by step; the first reads the prompt."""
    decoder, waits = session.decoder(), list[list[str]]()
    request = session.request(prompt, params)
    decoder.add(request)
    while not decoder.is_idle:
        gpu.waits.clear()
        decoder.step()
        waits.append([*gpu.waits])
    return request.token_ids, waits


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> set[tuple[bool, int]]:
    """Calls of torch's attention: whether it may choose cuDNN's, and columns of the mask beyond the last 16.

    CuDNN makes a plan for each new shape of a context; torch's own copies a ragged mask once for each KV head.
    """
    calls, attend = set[tuple[bool, int]](), torch.nn.functional.scaled_dot_product_attention

    def noted(*args: Any, attn_mask: Tensor, **keywords: Any) -> Any:
        calls.add((torch.backends.cuda.cudnn_sdp_enabled(), attn_mask.shape[-1] % 16))
        return attend(*args, attn_mask=attn_mask, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    return calls


def test_a_session_decodes_there(
    sessions: dict[str, Session], attended: set[tuple[bool, int]], caplog: pytest.LogCaptureFixture
) -> None:
    on_cpu = sessions["tiny-qwen3"]
    prompt, params = prompts(on_cpu)[0], greedy(5)
    sampled = SamplingParams(max_tokens=9, temperature=1.0, top_p=0.95, seed=3, ignore_eos=True)
    with pretended_gpu() as (gpu, graphs):
        session = open_on_gpu("tiny-qwen3", "float32")
        room = {len(session.drafter.cache.k), *(k.shape[1] for k, _ in session.target.cache.layers.values())}  # type: ignore[attr-defined]
        drawn, waits_of_drawn = decode(gpu, session, prompt, sampled)
        answer, waits = decode(gpu, session, prompt, params)
    assert drawn == on_cpu.generate(prompt, sampled).token_ids
    assert all(step in (STEP, STEP[1:]) for step in waits_of_drawn)
    assert answer == on_cpu.generate(prompt, params).token_ids
    assert is_recorded(session)
    assert sum("torch.compile lacks Triton: passes have more kernels" in message for message in caplog.messages) == 1
    assert sum(graph.replays for graph in graphs) > 2 * len(waits[1:])
    assert waits == [STEP[1:], *[STEP] * len(waits[1:])]
    assert attended == {(False, 0)}
    assert room == {2 * num_pages_for(session.max_length)}, "no cache moves later, and nothing is recorded again"


@pytest.mark.parametrize("has_failed", [False, True])
def test_closing_frees_what_was_recorded(has_failed: bool, uncollected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kernel has failed, too, when every call raises its error again."""

    def fails(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    older = {*RecordedGraph.live}
    with pretended_gpu() as (gpu, graphs):
        session = open_on_gpu("tiny-qwen3")
        session.generate([5, 6, 7], greedy(2))
        watched = [*memory_of(session), *map(weakref.ref, {*RecordedGraph.live} - older)]
        assert len(watched) > len(graphs) > 3
        gpu.waits.clear()
        if has_failed:
            monkeypatch.setattr(torch.cuda, "synchronize", fails)
        session.close()
        gpu.caches.clear()  # it remembers those that kernels were told to write
        assert [found() for found in watched] == [None] * len(watched)
        assert gpu.waits == ["synchronize", "empty_cache"][has_failed:]


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "expected"), [("float32", False), ("bfloat16", True)])
def test_experts_are_recorded_in_bf16(dtype: str, expected: bool, sessions: dict[str, Session]) -> None:
    """In FP32 torch's product of experts waits for their numbers of rows."""
    prompt, params = prompts(sessions["tiny-gpt-oss"])[0], greedy(5)
    with pretended_gpu():
        session = open_on_gpu("tiny-gpt-oss", dtype)
        answer, plain = session.generate(prompt, params), session.generate_plain(prompt, params)
    assert answer.token_ids == plain.token_ids
    assert is_recorded(session) is expected


@pytest.mark.full
@pytest.mark.parametrize("draft", ["tiny-qwen3-dflash2", "tiny-qwen3-lilicorr"])
def test_a_lattice_is_walked_and_drawn_there(draft: str, sessions: dict[str, Session], tmp_path: Path) -> None:
    build(FIXTURES / draft, tmp_path / "engine", FIXTURES / "tiny-qwen3")
    prompt = prompts(sessions["tiny-qwen3"])[0]
    with pretended_gpu() as (gpu, _):
        session = open_on_gpu("tiny-qwen3", engine=tmp_path / "engine")
        drawn = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
        session.generate(prompt, drawn)
        answer, waits = decode(gpu, session, prompt, greedy(5))
    assert answer == sessions["tiny-qwen3"].generate(prompt, greedy(5)).token_ids
    assert waits == [STEP[1:], *[STEP] * len(waits[1:])]


SETTINGS: list[dict[str, Any]] = [
    {}, {"logprobs": True, "top_logprobs": 2}, {"temperature": 0.4, "seed": 1}, {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.4, "top_k": 5, "logprobs": True}, {"temperature": 0.6, "min_p": 0.1, "prompt_logprobs": True},
    {"temperature": 0.5, "repetition_penalty": 1.3}, {"frequency_penalty": 0.5}, {"logit_bias": {3: 9.0}},
    {"temperature": 0.3, "logit_bias": {3: 9.0}}, {"temperature": 0.5, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.7, "repetition_penalty": 0.8, "presence_penalty": 0.7, "logprobs": True},
]  # fmt: skip
VOCAB = 60


def random_step(rng: np.random.Generator) -> tuple[list[StepInput], torch.Tensor]:
    """A step of requests of all settings, in any order: blocks, ends of prompts, and chunks of prompts before."""
    parts, rows = [], []
    for slot, index in enumerate(rng.permutation(len(SETTINGS))):
        params = SamplingParams(max_tokens=99, **{"seed": int(index)} | SETTINGS[index])
        processors = [LogitBias(params.logit_bias)] if params.logit_bias else []
        prompt, answer = rng.integers(0, VOCAB + 2, 9).tolist(), rng.integers(0, VOCAB, 9).tolist()
        request = Request(
            prompt_ids=prompt, params=params, sampler=params.sampler(), stop_ids=frozenset(), processors=processors
        )
        num_logits = int(rng.integers(0, 7))
        num_prompt_logits = int(rng.integers(1, 4)) if params.prompt_logprobs and num_logits < 2 else 0
        if num_logits > 1:
            append_all([request], [NO_PROPOSALS], [answer], 0.0)
        logits = rng.normal(0, 4, (num_prompt_logits + num_logits, VOCAB)).astype(np.float32)
        certain = logits[num_prompt_logits:].argmax(-1)[:-1]
        proposals = Proposals(np.where(rng.random(len(certain)) < 0.8, certain, 3).tolist())
        if params.temperature > 0 and num_logits > 1 and rng.random() < 0.2:
            ids = np.stack([(token + np.arange(4)) % VOCAB for token in proposals.token_ids])
            proposals = Proposals(proposals.token_ids, ids, rng.dirichlet(np.ones(4), len(ids)))
        if rng.random() < 0.3 and num_logits:
            logits[rng.integers(num_prompt_logits, len(logits)) :, 7] = np.nan
        token_ids = [0, *proposals.token_ids]
        parts.append(StepInput(slot, token_ids, num_prompt_logits + num_logits, request, proposals, num_prompt_logits))
        rows.append(logits)
    return parts, torch.from_numpy(np.concatenate(rows))


def test_a_step_emits_there_what_it_does_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and log probabilities; the host waits for the GPU once, or twice where a filter leaves many tokens."""
    monkeypatch.setattr(accept, "HEAVIEST", 16)
    steps = [[random_step(np.random.default_rng(seed)) for _ in range(2)] for seed in range(16)]
    emitted = [accept_parts(*step) for step, _ in steps]
    num_waits, num_accepted, accept_rows = set[int](), 0, _C.accept_rows

    def judged_here(rows: Any, num_rows: Any, skipped: Any, answers: Any, proposals: Any) -> list[list[int]]:
        (answer,) = answers
        assert answer in processed, "only with a processor"
        return accept_rows(rows, num_rows, skipped, answers, proposals)

    processed = [part.request.answer for _, (parts, _) in steps for part in parts if part.request.processors]
    monkeypatch.setattr(_C, "accept_rows", judged_here)
    with pretended_gpu() as (gpu, _):
        for (_, (parts, logits)), expected in zip(steps, emitted, strict=True):
            gpu.waits.clear()
            assert accept_parts(parts, logits.to("cuda", non_blocking=True)) == expected
            num_waits.add(len(gpu.waits))
            num_accepted += sum(len(tokens) > 1 for tokens in expected)
    assert num_waits == {1, 2}
    assert num_accepted > 12
    for (parts, _), (others, _) in steps:
        for part, other in zip(parts, others, strict=True):
            for name in ("logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"):
                assert getattr(part.request, name) == getattr(other.request, name)


def test_the_current_gpu_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Safetensors and TensorRT take the first one for "cuda"."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CudaLauncher(torch.device("cuda")).device.index is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [str(CudaLauncher(torch.device(name)).device) for name in ("cuda", "cuda:0")] == ["cuda:1", "cuda:0"]


def test_what_is_wrong_with_a_gpu_is_not_the_checkpoints(monkeypatch: pytest.MonkeyPatch, uncollected: None) -> None:
    """Too little memory is said, and keeps nothing of the model; what a kernel did wrong comes as it is."""
    models = list[weakref.ref[Any]]()

    def noted(*args: Any, **options: Any) -> Any:
        models.append(weakref.ref(model := load_model(*args, **options)))
        return model

    monkeypatch.setattr(load, "load_model", noted)
    target, errors = read_target(FIXTURES / "tiny-qwen3"), [torch.OutOfMemoryError("CUDA out of memory.\nOf 80 GB ...")]
    errors.append(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))

    def fails(*_: Any, **__: Any) -> None:
        raise errors[0]

    monkeypatch.setattr(GatheredPass, "attend", fails)
    monkeypatch.setattr("dflash_trt.runtime.load.accelerate", lambda _: TORCH_OPERATORS)
    load_target = prepare_target(target, [0], 1, ALONE, dtype="auto", device="cpu")
    with pytest.raises(CheckpointError, match=r"fit into the GPU\'s memory \(CUDA out of memory\.\)\n") as told:
        load_target()
    assert (told.value.__context__, [model() for model in models]) == (errors[0], [None])
    del errors[0]
    with pytest.raises(torch.AcceleratorError):
        load_target()
    with pytest.raises(torch.AcceleratorError), room_for(2):
        raise errors[0]


@pytest.mark.full
def test_a_gpu_without_room_for_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(context_cache, "grown", full)
    with pretended_gpu(), pytest.raises(RequestError) as found:
        open_on_gpu("tiny-qwen3")
    assert found.value.message.startswith("4 GiB of caches do not fit: 1024.0 GiB are free")
