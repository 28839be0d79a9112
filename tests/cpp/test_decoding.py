# SPDX-License-Identifier: Apache-2.0
"""Acceptance and bookkeeping of a step's answers, against the reference on random cases; and what they refuse."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from dflash_trt import _C
from dflash_trt.engine.proposals import Proposals
from tests.reference import answer as reference
from tests.reference import sampling
from tests.reference.sampling import Params

NO_PROPOSALS = Proposals([])
PROMPT = [1, 2, 40]


def new_answer(params: Params = Params(), max_tokens: int = 99, stop_ids: Sequence[int] = ()) -> _C.Answer:  # noqa: B008
    return _C.Answer(_C.SamplerParams(**asdict(params)), PROMPT, max_tokens, list(stop_ids))


@pytest.mark.parametrize("seed", range(40))
def test_answers_grow_as_those_of_the_reference(seed: int) -> None:
    """Many at once, each with an end of its own; some are cut, as by a stop text."""
    rng = random.Random(seed)
    known = [reference.Answer(rng.randint(1, 20), rng.sample(range(12), rng.randint(0, 2))) for _ in range(6)]
    answers = [new_answer(max_tokens=each.max_tokens, stop_ids=each.stop_ids) for each in known]
    for time in range(12):
        proposals = [random_proposals(rng) for _ in known]
        accepted = [random_tokens(rng, drafts) for drafts in proposals]
        endings = [
            each.append(time, drafts.token_ids, drafts.is_forced, tokens)
            for each, drafts, tokens in zip(known, proposals, accepted, strict=True)
        ]
        blocks = proposals[: rng.randint(0, len(proposals))]
        expected_counts = reference.draft_counts([(each.token_ids, each.is_forced) for each in blocks], accepted)
        assert _C.draft_counts(blocks, accepted) == expected_counts
        ended = [(place, reason) for place, reason in enumerate(endings) if reason is not None]
        assert _C.append_all(answers, proposals, accepted, time) == ended
        for answer, expected, tokens in zip(answers, known, accepted, strict=True):
            if tokens and rng.random() < 0.1:
                count = len(expected.token_ids) - rng.randrange(len(expected.passes[-1][1]))
                answer.cut(count)
                expected.cut(count)
            for begin in (0, rng.randint(0, 30)):
                assert answer.token_ids(begin) == expected.token_ids[begin:]
                assert answer.passes(begin) == expected.passes[begin:]
            assert len(answer) == len(expected.token_ids)
        begun = [place for place, each in enumerate(known) if each.passes]
        assert _C.last_passes([answers[place] for place in begun]) == reference.last_passes(known)
        lengths = [rng.randint(0, 9) for _ in begun]
        limits = [min(length, known[place].num_left - 1) for length, place in zip(lengths, begun, strict=True)]
        anchors = [known[place].token_ids[-1] for place in begun]
        assert _C.next_blocks([answers[place] for place in begun], lengths) == (anchors, limits)
        going = [place for place, reason in enumerate(endings) if reason is None]
        known, answers = [known[place] for place in going], [answers[place] for place in going]


@pytest.mark.parametrize("seed", range(20))
def test_counts_of_tokens_are_kept_as_an_answer_grows(seed: int) -> None:
    """They are asked for now and then only, of vocabularies of two sizes."""
    rng = random.Random(seed)
    answer = new_answer(Params(presence_penalty=0.5))
    for time in range(12):
        _C.append_all([answer], [NO_PROPOSALS], [rng.choices(range(12), k=rng.randint(1, 3))], time)
        if rng.random() < 0.5:
            continue
        vocab, others = rng.choice([12, 30]), rng.choices(range(30), k=rng.randint(0, 5))
        tokens, counts = answer.table_of_counts(vocab, others).reshape(2, -1).tolist()
        found = dict(zip(tokens, counts, strict=True))
        assert len(found) == len(tokens)
        known = dict.fromkeys(others, -1) | dict.fromkeys(PROMPT, 0) | Counter(answer.token_ids())
        assert found == {token: count for token, count in known.items() if token < vocab}
        if rng.random() < 0.5 and len(answer.passes(time)[0][1]) > 1:
            answer.cut(len(answer) - 1)


def test_counts_need_a_penalty_and_tokens_of_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="expected an answer with a penalty"):
        new_answer().table_of_counts(12, [])
    answer = new_answer(Params(presence_penalty=0.5))
    _C.append_all([answer], [NO_PROPOSALS], [[5, 11]], 0.0)
    with pytest.raises(ValueError, match=r"output_ids in \[0, 11\), found 11"):
        answer.table_of_counts(11, [])
    assert answer.table_of_counts(12, [11]).tolist() == [1, 2, 5, 11, 0, 0, 1, 1]


def random_proposals(rng: random.Random) -> Proposals:
    return Proposals(rng.choices(range(12), k=rng.randint(0, 5)), is_forced=rng.random() < 0.2)


def random_tokens(rng: random.Random, drafts: Proposals) -> list[int]:
    """Some of the drafts and a token after them; now and then none."""
    return [*drafts.token_ids[: rng.randint(0, 5)], rng.randrange(12)] if rng.random() < 0.97 else []


@pytest.mark.parametrize("seed", range(40))
def test_what_a_device_chose_is_accepted_where_it_equals_the_proposals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = rng.integers(0, 6, 8).tolist()
    skipped = [int(rng.integers(0, count + 1)) for count in num_rows]
    choices, finite = rng.integers(0, 3, sum(num_rows)), rng.random(sum(num_rows)) < 0.9
    ends = np.cumsum(num_rows).tolist()
    drawn = [slice(end - count + skip, end) for end, count, skip in zip(ends, num_rows, skipped, strict=True)]
    proposals = [Proposals(rng.integers(0, 3, max(0, rows.stop - rows.start - 1)).tolist()) for rows in drawn]
    expected = [
        reference.accept_chosen(choices[rows].tolist(), finite[rows].tolist(), drafts.token_ids)
        for rows, drafts in zip(drawn, proposals, strict=True)
    ]
    assert _C.accept_chosen(choices, finite, num_rows, skipped, proposals) == expected


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.4}, {"temperature": 0.7},
    {"temperature": 1.2, "top_k": 4}, {"temperature": 0.9, "top_p": 0.8}, {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_blocks_of_all_settings_are_accepted_as_by_the_reference(seed: int) -> None:
    """Five steps, so that counted tokens are those of the answer; rows that are not finite, and drawn proposals."""
    rng, vocab = np.random.default_rng(seed), 12
    params = [Params(**settings, seed=seed) for settings in SETTINGS]
    answers = [new_answer(own) for own in params]
    for time in range(5):
        num_rows = [int(rng.integers(1, 5)) for _ in answers]
        logits = np.round(rng.normal(0, 2, (sum(num_rows), vocab)).astype(np.float32), int(rng.integers(0, 4)))
        logits[rng.random(len(logits)) < 0.15, rng.integers(vocab)] = rng.choice([np.nan, np.inf])
        logits[rng.random(len(logits)) < 0.05] = -np.inf
        skipped = [int(rng.integers(0, count + 1)) for count in num_rows]
        expected, proposals, end = list[list[int]](), list[Proposals](), 0
        for own, answer, count, skip in zip(params, answers, num_rows, skipped, strict=True):
            end += count
            rows = logits[end - count + skip : end]
            finite = rows[: sum(1 for _ in takewhile(bool, np.isfinite(rows.max(axis=-1, initial=-np.inf))))]
            drafts, before = propose(rng, own, answer.token_ids(), rows), answer.token_ids()
            proposals.append(drafts)
            cut = drafts.first(max(0, len(finite) - 1))
            place = own, len(before), PROMPT, before
            if not len(finite):
                expected.append([])
            elif cut.candidate_ids is not None and cut.probabilities is not None and own.temperature > 0:
                drawn_from = cut.candidate_ids, cut.probabilities
                expected.append(sampling.verify_drawn(finite, cut.token_ids, *place, *drawn_from))
            else:
                expected.append(sampling.verify_block(finite, cut.token_ids, *place))
        assert _C.accept_rows(logits, num_rows, skipped, answers, proposals) == expected
        # Sometimes not all of them are appended: the answer must count its tokens anew.
        taken = [tokens[: len(tokens) - (len(tokens) > 1 and rng.random() < 0.2)] for tokens in expected]
        going = [place for place, tokens in enumerate(taken) if tokens]
        _C.append_all([answers[i] for i in going], [proposals[i] for i in going], [taken[i] for i in going], time)


def propose(rng: np.random.Generator, params: Params, output: list[int], rows: sampling.Logits) -> Proposals:
    """Proposals before each row but the first; most are what the target would emit, some were drawn."""
    token_ids = list[int]()
    for row in np.nan_to_num(rows, posinf=9.0, neginf=-9.0)[:-1]:
        own = sampling.verify_block(
            row[None], [], params, len(output) + len(token_ids), [1, 2, 40], [*output, *token_ids]
        )
        token_ids.append(own[0] if rng.random() < 0.8 else int(rng.integers(len(row))))
    if not token_ids or rng.random() < 0.5:
        return Proposals(token_ids)
    ids = np.stack([(token + np.arange(3)) % rows.shape[1] for token in token_ids])
    return Proposals(token_ids, ids, rng.dirichlet(np.ones(3), len(ids)))


def test_equal_logits_far_apart_have_the_first_token() -> None:
    """The largest is looked for in parts of a row; zeros of either sign are equal."""
    for places, expected in (((9000, 5000, 4095), 4095), ((4096, 8191), 4096), ((12_000,), 12_000)):
        logits = np.full((1, 12_001), -1.0, dtype=np.float32)
        logits[0, list(places)] = 0.0
        logits[0, min(places)] = -0.0
        answers = [new_answer(Params(temperature=0.0))]
        assert _C.accept_rows(logits, [1], [0], answers, [NO_PROPOSALS]) == [[expected]]


def test_the_rows_of_accepted_tokens() -> None:
    found = [(*each, rows.tolist()) for *each, rows in _C.row_passes([5, 1, 2, 3], [3, 1, 2, 4], [2, 1, 0, 4], 5)]
    assert found == [([5, 1, 3], [2, 1, 2], [0, 1, 3, 6, 7]), ([3], [2], [8, 9])]
    assert _C.row_passes([], [], [], 1) == []


@pytest.mark.parametrize("seed", range(20))
def test_passes_over_accepted_rows_are_those_of_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.sample(range(20), rng.randint(0, 8))
    num_rows = [rng.randint(0, 9) for _ in slots]
    case = slots, num_rows, [rng.randint(0, count) for count in num_rows], rng.randint(1, 12)
    assert [(*each, rows.tolist()) for *each, rows in _C.row_passes(*case)] == reference.row_passes(*case)


ROWS = np.zeros((2, 4), dtype=np.float32)
DRAWN = Proposals([1], np.array([[1, 2]]), np.array([[0.5, 0.5]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: _C.accept_rows(ROWS, [3], [0], [a], [NO_PROPOSALS]), "rows of each part within the logits, found 3"),
        (lambda a: _C.accept_rows(ROWS, [2], [3], [a], [NO_PROPOSALS]), "no more skipped rows than rows, found 3"),
        (lambda a: _C.accept_rows(ROWS, [-1], [0], [a], [NO_PROPOSALS]), "rows of each part within the logits"),
        (lambda a: _C.accept_rows(ROWS, [2], [0], [a], []), "as many proposals as parts, found 0"),
        (lambda a: _C.accept_rows(ROWS, [2], [], [a], [NO_PROPOSALS]), "skipped rows of each part, found 0"),
        (lambda a: _C.accept_rows(ROWS, [2], [0], [a], [DRAWN._replace(token_ids=[3])]), "proposal 0 once among"),
        (lambda a: _C.append_all([a], [NO_PROPOSALS], [], 0.0), "tokens of each answer, found 0"),
        (lambda a: _C.append_all([a], [NO_PROPOSALS], [[1]], 0.0), "found its last token"),
        (lambda a: a.cut(0), "ends in the last pass, found 0"),
        (lambda a: a.cut(4), "ends in the last pass, found 4"),
        (lambda a: _C.next_blocks([a], []), "a length for each answer, found 0"),
        (lambda a: _C.next_blocks([new_answer()], [1]), "answers that have begun"),
        (lambda a: _C.last_passes([new_answer()]), "answers that have begun"),
        (lambda a: _C.draft_counts([NO_PROPOSALS], []), "tokens of each block, found 0"),
        (lambda a: _C.row_passes([0], [1], [2], 1), "no more kept rows than rows, found 2"),
        (lambda a: _C.row_passes([], [1], [1], 1), "a slot for each part, found 0"),
        (lambda a: _C.row_passes([0], [1], [1], 0), "passes of at least one row, found 0"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[_C.Answer], Any], message: str) -> None:
    answer = new_answer(max_tokens=3)
    _C.append_all([answer], [NO_PROPOSALS], [[5]], 0.0)
    _C.append_all([answer], [Proposals([6])], [[6, 7]], 1.0)
    with pytest.raises(ValueError, match=message):
        call(answer)
    with pytest.raises((TypeError, RuntimeError)):
        _C.last_passes([None])  # type: ignore[list-item]
