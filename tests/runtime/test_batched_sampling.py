# SPDX-License-Identifier: Apache-2.0
"""Sampling and log probabilities in a batch: a request's seed alone decides its tokens, whatever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dflash_trt.api.completion import FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.runtime.answer import completion
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.session import Session, run
from tests.checkpoint.samples import refusal
from tests.decoding import decode
from tests.fixtures_data import prompts
from tests.reference import sampling as reference
from tests.runtime.batches import Job, Workload, drive, random_workload

NUM_TOP = 3


def target_logprobs(workload: Workload, token_ids: list[int]) -> torch.Tensor:
    return target_logits(workload, token_ids).double().log_softmax(dim=-1)


@pytest.mark.parametrize(
    ("prefill_chunk", "bias"), [pytest.param(3, None, marks=pytest.mark.full), (64, {1: 30.0, 3: -50.0})], ids=str
)
def test_logprobs_are_the_targets_own(workload: Workload, prefill_chunk: int, bias: dict[int, float] | None) -> None:
    """In a batch, whose prompts are read by chunks and whose beginnings others have left in the caches."""
    params = SamplingParams(
        max_tokens=9, logprobs=True, top_logprobs=NUM_TOP, prompt_logprobs=True, logit_bias=bias, ignore_eos=True
    )
    decoder = workload.session.decoder(prefill_chunk=prefill_chunk, prefix_caching=True)
    texts = [job.prompt_ids * (1 + 40 // len(job.prompt_ids)) for job in workload.jobs[:4]]
    for _ in range(2):
        answers = run(decoder, [workload.session.request(text, params) for text in texts])
        for prompt, answer in zip(texts, answers, strict=True):
            expected = target_logprobs(workload, [*prompt, *answer.token_ids])[:-1]
            given = answer.prompt_logprobs
            logprobs = [*given.logprobs, *answer.logprobs]
            tokens = torch.tensor([*prompt, *answer.token_ids])[1:]
            np.testing.assert_allclose(logprobs, expected.gather(-1, tokens[:, None])[:, 0], atol=2e-4)
            for row, top in zip(expected, [*given.top_logprobs, *answer.top_logprobs], strict=True):
                values, _ = row.topk(NUM_TOP)
                np.testing.assert_allclose(list(top.values()), values, atol=2e-4)
                np.testing.assert_allclose(list(top.values()), row[list(top)], atol=2e-4)


def test_a_bias_with_drafts_is_the_bias_without(workload: Workload) -> None:
    settings = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}
    params = SamplingParams(max_tokens=24, logit_bias={1: 1.0, 2: -100.0}, ignore_eos=True, seed=3, **settings)
    drafted, plain = ([workload.request(job, params) for job in workload.jobs[:8]] for _ in range(2))
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


SETTINGS: dict[str, dict[str, float]] = {
    "softmax": {"temperature": 1.0},
    "hot": {"temperature": 1.5, "min_p": 0.05},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k": {"temperature": 0.7, "top_k": 3},
    "penalties": {
        **{"temperature": 1.0, "top_p": 0.95},
        **{"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    },
    "greedy-penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.4},
}


@pytest.fixture(scope="module", params=["qwen3", pytest.param("gpt_oss", marks=pytest.mark.full)])
def workload(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    seed = {"qwen3": 8, "gpt_oss": 6}[request.param]
    return random_workload(tmp_path_factory.mktemp(request.param), request.param, seed)


def target_logits(workload: Workload, token_ids: Sequence[int]) -> torch.Tensor:
    """[len(token_ids), V] by transformers' own attention, without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = workload.oracle(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits


def settings_of(job: Job, index: int) -> SamplingParams:
    """Each request its own settings and seed."""
    kinds = list(SETTINGS.values())
    return SamplingParams(
        max_tokens=job.max_tokens,
        seed=1000 + index,
        ignore_eos=True,
        logprobs=True,
        **kinds[index % len(kinds)],
    )


def test_tokens_are_those_of_the_rule_on_the_targets_logits(workload: Workload) -> None:
    """Each emitted token is what the reference draws there from transformers' logits, with this request's seed."""
    jobs = [job for job in workload.jobs if job.max_tokens > 8][:12]
    kinds = [list(SETTINGS.values())[i % len(SETTINGS)] for i in range(len(jobs))]
    params = [
        SamplingParams(max_tokens=job.max_tokens, seed=2**64 - 1 - i, ignore_eos=True, **settings)
        for i, (job, settings) in enumerate(zip(jobs, kinds, strict=True))
    ]
    requests = [workload.request(job, p) for job, p in zip(jobs, params, strict=True)]
    drive(workload.decoder(5, prefill_chunk=7), requests, random.Random(0))
    for request, settings in zip(requests, kinds, strict=True):
        prompt, output = list(request.prompt_ids), request.token_ids
        logits = target_logits(workload, [*prompt, *output[:-1]])[len(prompt) - 1 :].numpy()
        rule = reference.Params(seed=request.sampler.seed, **settings)
        drawn = [reference.sample(logits[i], rule, prompt, output[:i], i) for i in range(len(output))]
        assert output == drawn
    assert any(r.token_ids != job.expected for r, job in zip(requests, jobs, strict=True)), "all as if greedy"


def test_the_batch_and_the_draft_length_change_no_output(workload: Workload) -> None:
    """Tokens and log probabilities are those of requests alone and without drafts."""
    jobs = workload.jobs[:18]
    params = [settings_of(job, index) for index, job in enumerate(jobs)]
    alone = [workload.request(job, p) for job, p in zip(jobs, params, strict=True)]
    for request in alone:
        run(workload.session.plain_decoder(), [request])
    for length in (0, 5):
        requests = [workload.request(job, p) for job, p in zip(jobs, params, strict=True)]
        drive(workload.decoder(length, num_tokens=200, prefill_chunk=7), requests, random.Random(length))
        assert [r.token_ids for r in requests] == [r.token_ids for r in alone]
        for ours, theirs in zip(requests, alone, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert length == 0 or sum(step.accepted for r in requests for step in r.steps) > 5, "nothing was accepted"


def test_logprobs_end_with_the_answer(sessions: dict[str, Session]) -> None:
    """A stop token among accepted drafts cuts the tokens after it and their log probabilities."""
    session, cut = sessions["tiny-qwen3"], 0
    for prompt in prompts(session)[:2]:
        whole = session.generate_plain(prompt, SamplingParams(max_tokens=12, ignore_eos=True)).token_ids
        for stop in set(whole):
            params = SamplingParams(max_tokens=12, stop_token_ids=frozenset([stop]), ignore_eos=True, logprobs=True)
            request = decode(session, prompt, params)
            expected = whole[: whole.index(stop) + 1]
            assert request.token_ids == expected
            assert request.finished is FinishReason.STOP
            assert len(request.logprobs) == len(expected)
            cut += bool(request.steps) and request.steps[-1].accepted == len(request.steps[-1].token_ids)
    assert cut > 1, "hardly a stop token was an accepted draft"


def test_without_a_seed_each_request_draws_its_own(workload: Workload) -> None:
    job = next(job for job in workload.jobs if job.max_tokens > 12)
    params = SamplingParams(max_tokens=job.max_tokens, temperature=1.5, ignore_eos=True)
    requests: list[Request] = [workload.request(job, params) for _ in range(8)]
    drive(workload.decoder(5), requests)
    assert len({completion(request).seed for request in requests}) == 8
    assert len({tuple(request.token_ids) for request in requests}) > 1
    again = SamplingParams(
        max_tokens=job.max_tokens, temperature=1.5, ignore_eos=True, seed=completion(requests[3]).seed
    )
    assert workload.alone(job, 2, again).token_ids == requests[3].token_ids
