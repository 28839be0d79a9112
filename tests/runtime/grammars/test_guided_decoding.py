# SPDX-License-Identifier: Apache-2.0
"""Guided text matches its grammar, and drafts change none of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import exp, sqrt
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import Grammar, SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.runtime.session import Session, run
from tests.checkpoint.samples import refusal
from tests.decoding import open_trained, open_without_tokenizer, text_of
from tests.engines import trained_engine
from tests.paths import FIXTURES

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
REGEX = r"(def|class) [a-z_]{3,9}\([a-z]?\):"
EBNF = 'root ::= "(" item ("," item){0,2} ")"\nitem ::= "self" | "None"'
GRAMMARS = {
    "json": Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
    "regex": Grammar(kind="regex", text=REGEX),
    "ebnf": Grammar(kind="grammar", text=EBNF),
}
PROMPTS = ["def parse(", "class Config:\n    ", "import json\n", '{"name": ']


@pytest.fixture(scope="module", params=["tiny-qwen3", pytest.param("tiny-gpt-oss", marks=pytest.mark.full)])
def session(request: pytest.FixtureRequest) -> Session:
    return open_trained(request.param, max_batch_size=len(PROMPTS))


def ids(session: Session, text: str) -> list[int]:
    assert session.tokenizer is not None
    return list(session.tokenizer(text)["input_ids"])


def answers(session: Session, draft_length: int | None, **settings: Any) -> list[Completion]:
    """In one batch, with an unguided request in it."""
    params = SamplingParams(max_tokens=80, draft_length=draft_length, seed=1, **settings)
    requests = [session.request(ids(session, prompt), params) for prompt in PROMPTS]
    free = session.request(ids(session, PROMPTS[0]), SamplingParams(max_tokens=8))
    return run(session.decoder(), [*requests, free])[:-1]


def matches(kind: str, text: str) -> bool:
    if kind == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    return re.fullmatch(REGEX if kind == "regex" else r"\((self|None)(,(self|None)){0,2}\)", text) is not None


QUICK = {("json", 1.0), ("regex", 0.0), ("ebnf", 0.0)}
CASES = [pytest.param(*c, marks=() if c in QUICK else pytest.mark.full) for c in product(GRAMMARS, [0.0, 1.0])]


@pytest.mark.parametrize(("kind", "temperature"), CASES)
def test_guided_text_matches_and_equals_plain_decoding(session: Session, kind: str, temperature: float) -> None:
    settings = {"structured_outputs": GRAMMARS[kind], "temperature": temperature}
    drafted, plain = answers(session, None, **settings), answers(session, 0, **settings)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    ended = [answer.text for answer in drafted if answer.finish_reason == "stop"]
    assert all(matches(kind, text) for text in ended), ended
    assert ended
    if temperature == 0:
        assert sum(answer.acceptance.accepted for answer in drafted if answer.acceptance is not None) > 0


def test_a_grammar_of_any_text_changes_nothing(session: Session) -> None:
    anything = Grammar(kind="regex", text=r"[\s\S]*")
    guided = answers(session, None, structured_outputs=anything)
    free = answers(session, None)
    assert [answer.token_ids for answer in guided] == [answer.token_ids for answer in free]
    assert [answer.finish_reason for answer in guided] == [answer.finish_reason for answer in free]
    assert [answer.acceptance for answer in guided] == [answer.acceptance for answer in free]
    assert len({tuple(answer.token_ids) for answer in free}) > 1


def test_forced_tokens_need_no_drafter(session: Session) -> None:
    """They are all accepted, count as no drafts, and the text stays that of plain decoding."""
    schema = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
    compact = Grammar(kind="json_schema", text=json.dumps(schema))
    drafted, plain = (answers(session, length, structured_outputs=compact) for length in (None, 0))
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    request = session.request(ids(session, PROMPTS[0]), SamplingParams(max_tokens=80, structured_outputs=compact))
    decoder, num_forced, forced = session.decoder(), 0, list[int]()
    decoder.add(request)
    while not decoder.is_idle:
        num_steps = len(request.steps)
        forced = request.forced(session.manifest.draft.num_draft_tokens) if request.token_ids else []
        decoder.step()
        if forced and len(request.steps) > num_steps:
            step = request.steps[-1]
            assert step.is_forced
            assert [*step.proposals] == forced[: len(step.proposals)]
            assert step.accepted == min(len(step.proposals), len(step.token_ids))
            num_forced += len(step.proposals)
    assert num_forced > 5
    found, total = Acceptance.of(request.steps), decoder.metrics().acceptance
    assert found == total
    assert found.forced == sum(step.accepted for step in request.steps if step.is_forced) > 5
    assert found.proposed == sum(step.proposed for step in request.steps if not step.is_forced)
    assert found.all_passes == len(request.steps)


def test_rows_of_a_block(session: Session) -> None:
    """A special token is not the text of its name, an answer ends where its text does, and nothing is advanced."""
    special = {token for token, added in session.tokenizer.added_tokens_decoder.items() if added.special}
    assert special > session.stop_ids
    stop = min(session.stop_ids)
    guided = session.grammars.processor(Grammar(kind="regex", text="[^z]{8}"))
    (eight,) = (token for token in range(1024) if text_of(session, [token]) == " " * 8)
    for _ in range(2):
        logits = np.zeros((4, 1024), dtype=np.float32)
        guided.process(logits, [eight, stop, 5])
        allowed = [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in logits]
        assert not allowed[0] & special
        assert eight in allowed[0]
        assert allowed[1] == session.stop_ids


REQUESTS = [
    *(pytest.param(seed, id=str(seed)) for seed in range(3)),
    *(pytest.param(seed, id=str(seed), marks=pytest.mark.full) for seed in range(3, 200)),
]


@pytest.mark.parametrize("seed", REQUESTS)
def test_random_requests_equal_plain_decoding(session: Session, seed: int) -> None:
    """Ten requests for each seed: grammars, prompts and temperatures in one batch."""
    random = Random(seed)
    kinds = [
        *GRAMMARS.values(), Grammar(kind="choice", text='["def", "def f", "class", "x"]'),
        Grammar(kind="json_schema", text=json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})),
    ]  # fmt: skip
    asked = [
        (random.choice(PROMPTS), random.choice(kinds), random.choice([0.0, 0.7, 1.0]), random.randrange(2**32))
        for _ in range(10)
    ]

    def tokens(draft_length: int | None) -> list[list[int]]:
        requests = [
            session.request(
                ids(session, prompt),
                SamplingParams(
                    max_tokens=48,
                    draft_length=draft_length,
                    seed=seed,
                    temperature=temperature,
                    structured_outputs=grammar,
                ),
            )
            for prompt, grammar, temperature, seed in asked
        ]
        return [answer.token_ids for answer in run(session.decoder(), requests)]

    assert tokens(None) == tokens(0)


def test_drafts_beyond_the_end(session: Session) -> None:
    """End tokens among the proposals, after a text that could go on and after one that could not, undo nothing."""
    (end, *_), (token,) = sorted(session.stop_ids), ids(session, "a")
    for text, follows in (("ab*", True), ("a", False)):
        guided = session.grammars.processor(Grammar(kind="regex", text=text))
        for proposals in ([token, end, end, end], [token, end, token], [end], [token, token]):
            logits = np.zeros((len(proposals) + 1, 1024), dtype=np.float32)
            guided.process(logits, proposals)
            assert np.isfinite(logits[0]).any()
            assert not np.isfinite(logits[0, end]), "the text has not begun"
            if proposals[0] == token:
                assert np.isfinite(logits[1, end])
                assert (np.isfinite(logits[1]).sum() > len(session.stop_ids)) == follows
        guided.advance([token, end, end, token])
        logits = np.zeros((1, 1024), dtype=np.float32)
        guided.process(logits, [])
        assert np.isfinite(logits[0, end])


HOSTILE = {
    "mask": Grammar(kind="grammar", text='root ::= (a | b)*\na ::= "a" a | ""\nb ::= "a" b | ""'),
    "advance": Grammar(kind="regex", text="((a{1,99}){1,99}){1,99}"),
}


@pytest.mark.parametrize("place", HOSTILE)
def test_what_takes_too_much_work_ends_its_request(session: Session, place: str) -> None:
    """The others go on, also when the same grammar comes again, whose compiled form has done that work before."""
    prompt = ids(session, "x")
    endless = dict.fromkeys(session.stop_ids, -100.0)
    for _ in range(2):
        params = [
            SamplingParams(max_tokens=800, structured_outputs=HOSTILE[place], logit_bias=endless),
            SamplingParams(max_tokens=4),
        ]
        requests = [session.request(prompt, each) for each in params]
        decoder = session.decoder()
        decoder.run(requests)
        assert "structured_outputs: the grammar takes too much work for a token" in str(requests[0].error)
        assert requests[1].error is None
        assert len(requests[1].token_ids) == 4


def probabilities(session: Session, prompt: list[int], options: Sequence[str]) -> Counter[str]:
    """Probability of each option over all its tokenisations, by the target's softmax over tokens that continue one."""
    pieces = {token: text_of(session, [token]) for token in range(session.manifest.target.vocab_size)}
    params = SamplingParams(max_tokens=1, prompt_logprobs=True)

    def extend(path: list[int], text: str) -> Counter[str]:
        if text in options:
            return Counter({text: 1.0})  # type: ignore[dict-item]
        tokens = [t for t, piece in pieces.items() if piece and any(o.startswith(text + piece) for o in options)]
        read = run(session.decoder(), [session.request([*prompt, *path, token], params) for token in tokens])
        weights = [exp(answer.prompt_logprobs.logprobs[-1]) for answer in read if answer.prompt_logprobs is not None]
        total: Counter[str] = Counter()
        for token, weight in zip(tokens, weights, strict=True):
            for option, share in extend([*path, token], text + pieces[token]).items():
                total[option] += share * weight / sum(weights)  # type: ignore[assignment]
        return total

    return extend([], "")


@pytest.mark.full
@pytest.mark.parametrize("session", ["tiny-qwen3", pytest.param("tiny-gpt-oss", marks=pytest.mark.full)], indirect=True)
def test_sampled_texts_have_the_targets_distribution(session: Session) -> None:
    options, number = ["self.a", "None", "not a", "self.b"], 400
    prompt = ids(session, "        return ")
    grammar = Grammar(kind="regex", text="|".join(map(re.escape, options)))
    requests = [
        session.request(prompt, SamplingParams(temperature=1.0, seed=seed, structured_outputs=grammar))
        for seed in range(number)
    ]
    drawn = Counter(answer.text for answer in run(session.decoder(), requests))
    expected = probabilities(session, prompt, options)
    assert drawn.keys() <= expected.keys()
    for option, share in expected.items():
        assert abs(drawn[option] / number - share) < 4 * sqrt(share * (1 - share) / number) + 1e-3, (drawn, expected)


def test_what_a_target_lacks() -> None:
    session = open_without_tokenizer(trained_engine("tiny-qwen3"), FIXTURES / "tiny-qwen3")
    params = SamplingParams(structured_outputs=GRAMMARS["regex"])
    assert "the target has no tokenizer" in refusal(lambda: session.request([5], params), RequestError)
