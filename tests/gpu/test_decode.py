# SPDX-License-Identifier: Apache-2.0
"""The whole runtime on a GPU without TensorRT: the fixtures' texts and steps, batches, graphs, prefixes, cancels.

Texts and steps are those of the same pair on this machine's CPU, where every other test of them runs. With `full` each
test runs on the CPU, too, where a stand-in records and replays what a GPU would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.device.launcher import CudaLauncher
from dflash_trt.runtime import sampling
from dflash_trt.runtime.accept import accept_parts
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.drafter.torch.graph_program import Program
from dflash_trt.runtime.drafter.torch_executor import TorchExecutor
from dflash_trt.runtime.session import Session, run
from dflash_trt.runtime.targets.huggingface import load_model
from dflash_trt.runtime.targets.packed_target import TORCH_OPERATORS, PackedTarget
from tests.contract.cuda_graphs import stand_in
from tests.decoding import greedy, open_trained
from tests.fixtures_data import PAIRS, prompts
from tests.paths import FIXTURES
from tests.runtime.batches import check_shared_pages
from tests.runtime.drafter.test_torch_executor import NUM_SLOTS, noise
from tests.runtime.drafter.test_torch_executor import run as run_drafter
from tests.runtime.drafter.torch.drafts import MAKERS
from tests.runtime.sampled_rows import by_rule, by_torch, check_all, random_logits, random_params

DEVICES = [pytest.param("cpu", marks=pytest.mark.full), pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_PROMPTS, NUM_TOKENS, NUM_AT_ONCE = 16, 96, 8
STEPS = {"tiny-qwen3": 485, "tiny-gpt-oss": 460}
"""ONNX Runtime's in FLOAT, all prompts together; a hundredth more or fewer is BF16's."""


@pytest.fixture(scope="module", params=PAIRS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=DEVICES)
def session(request: pytest.FixtureRequest, name: str) -> Iterator[Session]:
    options = {"device": request.param, "executor": "torch", "max_batch_size": NUM_AT_ONCE}
    if request.param == "cuda":
        yield open_trained(name, **options)
        return
    launcher = CudaLauncher(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        patch.setattr("dflash_trt.device.launcher.EagerLauncher", lambda: launcher)
        opened = open_trained(name, **options)
        taps, spec = opened.manifest.draft.target_layer_ids, opened.manifest.target
        model = load_model(FIXTURES / name, spec, taps)  # without a CPU's own layers
        opened.target = PackedTarget(model, taps, NUM_AT_ONCE, TORCH_OPERATORS, launcher)
        yield opened


@pytest.fixture(scope="module")
def asked(session: Session) -> list[list[int]]:
    return prompts(session)[:NUM_PROMPTS]


@pytest.fixture(scope="module")
def texts(name: str, asked: list[list[int]]) -> list[list[int]]:
    """Plain decoding on the CPU."""
    on_cpu = open_trained(name, device="cpu", max_batch_size=8)
    requests = [on_cpu.request(prompt, greedy(NUM_TOKENS)) for prompt in asked]
    return [completion.token_ids for completion in run(on_cpu.plain_decoder(), requests)]


def decode(session: Session, asked: Sequence[list[int]], at_once: int) -> Any:
    requests = [session.request(prompt, greedy(NUM_TOKENS)) for prompt in asked]
    return run(session.decoder(max_batch_size=at_once), requests)


@pytest.mark.parametrize("at_once", [1, NUM_AT_ONCE])
def test_texts_and_steps(name: str, session: Session, asked: Any, texts: Any, at_once: int) -> None:
    completions = decode(session, asked, at_once)
    assert [completion.token_ids for completion in completions] == texts
    assert abs(sum(completion.steps for completion in completions) - STEPS[name]) <= STEPS[name] // 100


def test_the_drafter_is_graphs(session: Session, monkeypatch: pytest.MonkeyPatch, asked: Any, texts: Any) -> None:
    """Once opened no call of ours runs again: a step replays, whatever its size."""
    executor = session.drafter.executor
    assert isinstance(executor, TorchExecutor)
    assert isinstance(executor._launcher, CudaLauncher)
    assert executor._draft is not None
    assert list(executor._draft.sizes) == [1, 2, 4, 8]
    monkeypatch.setattr(Program, "run", None)
    assert [completion.token_ids for completion in decode(session, asked[:3], 3)] == texts[:3]


def test_the_target_is_graphs(name: str, session: Session, asked: Any, texts: Any) -> None:
    """Decoding passes replay; prompts are launched, and so are experts in FP32, whose product waits for a GPU."""
    assert [completion.token_ids for completion in decode(session, asked[:3], 3)] == texts[:3]
    is_waiting = name == "tiny-gpt-oss" and session.drafter.executor.device.type == "cuda"
    assert_recorded(session, set() if is_waiting else {1, 4})


def assert_recorded(session: Session, num_segments: set[int]) -> None:
    """Whether passes of these numbers of segments are recorded; with none, no pass is."""
    assert isinstance(session.target, PackedTarget)
    found = {size.num_segments for size in session.target.recorded_sizes}
    assert found >= num_segments
    assert bool(found) is bool(num_segments)


@pytest.mark.gpu
def test_a_target_in_bf16_is_graphs(name: str) -> None:
    """Experts, too, where torch multiplies them without waiting: on compute capability 9.x and 10.x (torch 2.13)."""
    if name == "tiny-gpt-oss" and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs a GPU of compute capability 9.x or 10.x for experts in BF16")
    opened = open_trained(name, device="cuda", executor="torch", max_batch_size=4, dtype="bfloat16")
    (answer,) = decode(opened, prompts(opened)[:1], 1)
    assert len(answer.token_ids) == NUM_TOKENS
    assert answer.acceptance.tau > 1.5
    assert_recorded(opened, {1})


def test_a_prompt_begins_with_what_an_earlier_one_left(session: Session, asked: Any) -> None:
    check_shared_pages(session, asked[0])


def test_a_cancelled_request_leaves_the_others_alone(session: Session, asked: Any, texts: Any) -> None:
    decoder = session.decoder()
    requests = [session.request(prompt, greedy(NUM_TOKENS)) for prompt in asked[:4]]
    for request in requests:
        decoder.add(request)
    for _ in range(5):
        decoder.step()
    decoder.cancel(requests[1])
    while not decoder.is_idle:
        decoder.step()
    assert len(requests[1].token_ids) < NUM_TOKENS
    for index in (0, 2, 3):
        assert requests[index].token_ids == texts[index]


@pytest.mark.parametrize("session", ["cuda"], indirect=True)
@pytest.mark.gpu
def test_sampled_tokens_are_those_of_a_cpu(session: Session, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rules see the GPU's own logits; a request has its tokens to the bit, whatever filters it."""

    def by_both(parts: Any, logits: torch.Tensor) -> list[list[int]]:
        tokens = accept_parts(parts, logits)
        assert tokens == accept_parts(parts, logits.cpu())
        return tokens

    monkeypatch.setattr("dflash_trt.runtime.decoder.accept_parts", by_both)
    settings: list[dict[str, Any]] = [{}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.9}, {"repetition_penalty": 1.1}]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=7, ignore_eos=True, **own) for own in settings
    ]
    requests = [session.request(prompt, own) for prompt, own in zip(asked, params, strict=False)]
    assert any(answer.acceptance.tau > 1 for answer in run(session.decoder(), requests))


@pytest.mark.gpu
def test_sampling_computes_what_it_does_on_a_cpu() -> None:
    """Each operator of torch, in a vocabulary of Qwen's size, too."""
    rng = np.random.default_rng(0)
    logits, params = random_logits(rng, 40, 151_936), [random_params(rng, 151_936) for _ in range(40)]
    with torch.device("cuda"):
        check_all(sampling)
        assert by_torch(logits, params) == by_rule(logits, params)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt-oss", "trimmed head", "DFlash2", "fp8", "fp8+fp8-kv", "nvfp4", "Laguna"])
def test_it_computes_what_it_does_on_a_cpu(name: str, tmp_path: Any) -> None:
    """Both in BF16, so with noise of their own; FP8 and FP4 codes may flip."""
    manifest = MAKERS[name](tmp_path)
    bound = 0.02 if manifest.quantization.modules == {} else 0.3
    on_gpu = open_drafter(tmp_path / "engine", manifest, num_slots=NUM_SLOTS, device="cuda", executor="torch")
    on_cpu = open_drafter(tmp_path / "engine", manifest, num_slots=NUM_SLOTS, executor="torch")
    assert noise(*(run_drafter(drafter, tmp_path / "engine") for drafter in (on_gpu, on_cpu))) < bound
