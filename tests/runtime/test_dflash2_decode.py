# SPDX-License-Identifier: Apache-2.0
"""Decoding with the trained DFlash2 draft: the target's own tokens, in fewer steps than with DFlash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_trt.runtime.load import open_session
from dflash_trt.runtime.options import RuntimeOptions
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.session import Session, run
from tests.engines import build, build_with_head
from tests.fixtures_data import prompts
from tests.paths import FIXTURES

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash2", FIXTURES / "tiny-qwen3"
OPTIONS = RuntimeOptions(max_batch_size=4)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    engine = tmp_path_factory.mktemp("dflash2") / "engine"
    build(DRAFT, engine, TARGET)
    return open_session(engine, str(TARGET), OPTIONS)


def steps(session: Session, params: SamplingParams, count: int) -> int:
    """Verify steps over the first prompts, four at once; every answer is plain decoding's."""
    asked = prompts(session)[:count]
    plain = run(session.plain_decoder(), [session.request(prompt, params) for prompt in asked])
    drafted = run(session.decoder(), [session.request(prompt, params) for prompt in asked])
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    return sum(answer.steps or 0 for answer in drafted)


def test_greedy_answers_are_plain_ones_in_fewer_steps_than_dflash(
    session: Session, sessions: dict[str, Session]
) -> None:
    greedy = SamplingParams(max_tokens=64)
    dflash = [sessions["tiny-qwen3"].generate(prompt, greedy).steps or 0 for prompt in prompts(session)[:12]]
    assert steps(session, greedy, 12) < sum(dflash)


def test_sampled_answers_are_plain_ones(session: Session) -> None:
    """Tokens are drawn with the random number of their position, whatever was proposed there."""
    assert steps(session, SamplingParams(max_tokens=48, temperature=0.8, seed=11), 4) < 4 * 47


@pytest.mark.parametrize("rows", [None, 400])
def test_a_head_of_its_own(rows: int | None, session: Session, tmp_path: Path) -> None:
    """A copy of the head proposes the same; of a trimmed one, candidates and codebooks meet by the target's ids."""
    token_ids = None if rows is None else np.sort(np.random.default_rng(0).permutation(1024)[:rows])
    engine = build_with_head(DRAFT, TARGET, tmp_path, token_ids)
    own, greedy = open_session(engine, str(TARGET), OPTIONS), SamplingParams(max_tokens=32)
    whole = steps(session, greedy, 4)
    assert steps(own, greedy, 4) == whole if rows is None else whole <= steps(own, greedy, 4) < 4 * 31
    proposals = {token for step in _steps(own) for token in step}
    assert token_ids is None or proposals <= set(token_ids.tolist())


def _steps(session: Session) -> list[tuple[int, ...]]:
    request = session.request(prompts(session)[0], SamplingParams(max_tokens=32))
    run(session.decoder(), [request])
    return [step.proposals for step in request.steps]
