# SPDX-License-Identifier: Apache-2.0
"""A target that computes NaN: the request that meets it ends in an error, the others do not notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_trt.api.completion import FinishReason
from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import EngineError
from dflash_trt.llm import LLM
from dflash_trt.runtime.request import Request, completion
from dflash_trt.runtime.session import Session, open_session, run
from dflash_trt.runtime.targets.target import Verified
from tests.engines import trained_engine
from tests.llm.serving import open_llm
from tests.paths import FIXTURES

BAD = 7
"""Token whose embedding is NaN, which makes all that follows it NaN."""
PROMPTS = [list(range(20, 30)), list(range(40, 90)), [*range(20, 25), BAD, *range(30, 40)], list(range(100, 103))]
PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=1.0, seed=3),
    SamplingParams(max_tokens=12, repetition_penalty=1.1, logprobs=True),
]


@pytest.fixture
def engine() -> Path:
    return trained_engine("tiny-qwen3")


@pytest.fixture
def session(engine: Path) -> Session:
    """Two slots: those that come later take the slot that NaN was in."""
    session = open_session(engine, str(FIXTURES / "tiny-qwen3"), RuntimeOptions(max_batch_size=2))
    break_token(session)
    return session


def break_token(session: Session) -> None:
    with torch.no_grad():
        session.target.model.get_input_embeddings().weight[BAD] = float("nan")


def step_to_the_end(session: Session, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
    requests = [session.request(prompt, params) for prompt in prompts]
    decoder = session.decoder(prefill_chunk=16)
    for request in requests:
        decoder.add(request)
    while not decoder.is_idle:
        decoder.step()
    assert decoder.metrics().finished.get(FinishReason.ERROR, 0) == sum(BAD in prompt for prompt in prompts)
    assert decoder.slots.free_slots == 2
    return requests


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "penalised"])
def test_only_the_request_that_meets_nan_ends(session: Session, params: SamplingParams) -> None:
    expected = [alone for p in PROMPTS if BAD not in p for alone in step_to_the_end(session, [p], params)]
    requests = step_to_the_end(session, [PROMPTS[2], *PROMPTS, *PROMPTS], params)
    bad = [request for request in requests if BAD in request.prompt_ids]
    good = [request for request in requests if BAD not in request.prompt_ids]
    assert [request.token_ids for request in good] == 2 * [request.token_ids for request in expected]
    assert [request.steps for request in good] == 2 * [request.steps for request in expected]  # and what was drafted
    assert any(step.accepted for request in good for step in request.steps)
    for request in bad:
        assert (request.finished, request.token_ids) == (FinishReason.ERROR, [])
        with pytest.raises(EngineError, match="token 1 of the answer: expected finite logits from the target"):
            completion(request)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "penalised"])
def test_a_row_behind_an_accepted_token_ends_the_block(
    session: Session, params: SamplingParams, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens before it stand; at the row itself, the first of a later step, the answer ends."""
    whole = run(session.plain_decoder(), [session.request(PROMPTS[0], params)])[0].token_ids
    verify, seen = session.target.verify, 0

    def with_a_bad_row(*arguments: object, **options: object) -> Verified:
        """Whatever follows the fifth token of the answer is not finite."""
        nonlocal seen
        verified = verify(*arguments, **options)  # type: ignore[arg-type]
        first = max(0, 5 - len(request.token_ids))
        if len(request.token_ids) + len(verified.logits) > 5:
            with torch.inference_mode():
                verified.logits[first:] = value
            seen += 1
        return verified

    request = session.request(PROMPTS[0], params)
    monkeypatch.setattr(session.target, "verify", with_a_bad_row)
    decoder = session.decoder()
    decoder.add(request)
    while not decoder.is_idle:
        decoder.step()
    assert seen
    assert (request.finished, request.token_ids) == (FinishReason.ERROR, whole[:5])
    assert "token 6 of the answer" in str(request.error)


def test_the_error_of_one_prompt_is_raised_and_the_llm_goes_on(engine: Path) -> None:
    with open_llm(engine) as llm:
        assert isinstance(llm, LLM)
        expected = llm.generate(PROMPTS[0], PARAMS[0])[0].token_ids
        break_token(llm.backend.session)
        for _ in range(2):
            with pytest.raises(EngineError, match="expected finite logits from the target"):
                llm.generate(PROMPTS[2], PARAMS[1])
            assert llm.generate(PROMPTS[0], PARAMS[0])[0].token_ids == expected
