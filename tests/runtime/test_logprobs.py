# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of prompt, answer and likely tokens are the target's own; a bias moves tokens alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.runtime.request import completion
from dflash_trt.runtime.session import run
from tests.checkpoint.samples import refusal
from tests.runtime.batches import Workload, drive, random_workload

NUM_TOP = 3


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return random_workload(tmp_path_factory.mktemp("logprobs"), "qwen3", 8)


def target_logprobs(workload: Workload, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), V] by transformers' own attention, without a cache."""
    with torch.inference_mode():
        logits = workload.oracle(torch.tensor([token_ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


@pytest.mark.parametrize("prefill_chunk", [3, 64])
@pytest.mark.parametrize("bias", [None, {1: 30.0, 3: -50.0}], ids=str)
def test_logprobs_are_the_targets_own(workload: Workload, prefill_chunk: int, bias: dict[int, float] | None) -> None:
    """In a batch, whose prompts are read by chunks and whose beginnings others have left in the caches."""
    params = SamplingParams(
        max_tokens=9, logprobs=True, top_logprobs=NUM_TOP, prompt_logprobs=True, logit_bias=bias, ignore_eos=True
    )
    decoder = workload.session.decoder(prefill_chunk=prefill_chunk, prefix_caching=True)
    prompts = [job.prompt_ids * (1 + 40 // len(job.prompt_ids)) for job in workload.jobs[:8]]
    for _ in range(2):
        for prompt, answer in zip(
            prompts, run(decoder, [workload.session.request(ids, params) for ids in prompts]), strict=True
        ):
            expected = target_logprobs(workload, [*prompt, *answer.token_ids])[:-1]
            given = answer.prompt_logprobs
            assert given is not None
            assert given.top_logprobs is not None
            assert answer.logprobs is not None
            assert answer.top_logprobs is not None
            logprobs = [*given.logprobs, *answer.logprobs]
            tokens = torch.tensor([*prompt, *answer.token_ids])[1:]
            np.testing.assert_allclose(logprobs, expected.gather(-1, tokens[:, None])[:, 0], atol=2e-4)
            for row, top in zip(expected, [*given.top_logprobs, *answer.top_logprobs], strict=True):
                values, _ = row.topk(NUM_TOP)
                np.testing.assert_allclose(list(top.values()), values, atol=2e-4)
                np.testing.assert_allclose(list(top.values()), row[list(top)], atol=2e-4)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}], ids=str)
def test_a_bias_with_drafts_is_the_bias_without(workload: Workload, settings: dict[str, float]) -> None:
    params = SamplingParams(
        max_tokens=24, logit_bias={1: 1.0, 2: -100.0}, ignore_eos=True, seed=3, logprobs=True, **settings
    )
    drafted, plain = ([workload.request(job, params) for job in workload.jobs[:16]] for _ in range(2))
    drive(workload.decoder(workload.num_draft_tokens), drafted)
    drive(workload.decoder(0), plain)
    assert [request.token_ids for request in drafted] == [request.token_ids for request in plain]
    assert sum(step.accepted for request in drafted for step in request.steps) > 0
    unbiased = [workload.alone(job, 0, SamplingParams(max_tokens=24, ignore_eos=True)) for job in workload.jobs[:4]]
    assert [request.token_ids for request in unbiased] != [request.token_ids for request in plain[:4]]


def test_the_bias_decides(workload: Workload) -> None:
    """Compared with the argmax of the target's logits and the bias."""
    bias = {1: 0.5, 2: -0.5}
    job = workload.jobs[0]
    answer = completion(workload.alone(job, 7, SamplingParams(max_tokens=20, logit_bias=bias, ignore_eos=True)))
    rows = target_logprobs(workload, [*job.prompt_ids, *answer.token_ids])[len(job.prompt_ids) - 1 : -1]
    rows[:, list(bias)] += torch.tensor(list(bias.values()), dtype=torch.float64)
    assert answer.token_ids == rows.argmax(-1).tolist()


@pytest.mark.parametrize("bias", [{-1: 1}, {5: 101}, {5: "x"}, {"5": 1}, [5], {5: float("nan")}], ids=str)
def test_what_is_no_bias(bias: dict[int, float]) -> None:
    assert "logit_bias: expected a bias of -100 to 100" in refusal(
        lambda: SamplingParams(logit_bias=bias), RequestError
    )


def test_a_bias_for_a_token_that_there_is_not(workload: Workload) -> None:
    params = SamplingParams(logit_bias={10**6: 1})
    assert "found 1000000" in refusal(lambda: workload.session.request([1, 2], params), RequestError)
