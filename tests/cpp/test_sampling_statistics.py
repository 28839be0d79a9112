# SPDX-License-Identifier: Apache-2.0
"""Speculative sampling has the target's distribution: 200,000 tokens of a Markov chain for each setting.

The target is a fixed random function of the last two tokens, so every distribution is known exactly. All seeds
are fixed: a test passes always or never. Full tests show that the checks see rules that are wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dflash_trt import _C
from tests.reference import sampling as reference
from tests.reference.sampling import Params, Probabilities, textbook_verify

V, K = 16, 4
NUM_TOKENS, DRAWN_TOKENS, TOKENS_THAT_SHOW = 200_000, 40_000, 10_000
# A right rule passes one check with this chance; about 60 are made.
MIN_P_VALUE = 1e-4

Tokens = npt.NDArray[np.int64]
Emit = Callable[[int, int], list[int]]
"""State and output position -> the tokens that a verify pass emits there."""


class Chain:
    """States are the last two tokens, a * V + b; each has a block of proposals and the logits that judge it."""

    def __init__(self, params: _C.SamplerParams) -> None:
        rng = np.random.default_rng(2024)
        self.params = params
        logits = self.logits = rng.normal(0, 1.5, (V * V, V)).astype(np.float32)
        mediocre = (logits + rng.normal(0, 1.0, logits.shape)).argmax(axis=1)
        self.target = np.empty((V * V, V))
        for row, out in zip(logits, self.target, strict=True):
            _C.token_probabilities(row, params, out)
        states = [np.arange(V * V)]  # per row, if the proposals before it are accepted
        for _ in range(K):
            states.append(states[-1] % V * V + mediocre[states[-1]])
        self.proposals = np.stack([mediocre[state] for state in states[:K]], axis=1)
        self.blocks = logits[np.stack(states, axis=1)]  # [V * V, K + 1, V]
        self.block_targets = self.target[np.stack(states, axis=1)]
        self._proposal_lists = self.proposals.tolist()

    def verify_block(self, state: int, position: int) -> list[int]:
        return _C.verify_block(self.blocks[state], self._proposal_lists[state], self.params, position)

    def proposal_list(self, state: int) -> list[int]:
        return self._proposal_lists[state]

    def run(self, emit: Emit, num_tokens: int = NUM_TOKENS) -> Run:
        tokens, begins = [0, 0], []
        while len(tokens) < num_tokens:
            begins.append(len(tokens))
            tokens += emit(tokens[-2] * V + tokens[-1], len(tokens) - 2)
        return Run(self, np.array(tokens), np.array(begins))


@dataclass(frozen=True, slots=True)
class Run:
    """Two initial tokens, then the emitted ones."""

    chain: Chain
    tokens: Tokens
    begins: Tokens
    """Index of the first token of each pass."""

    @property
    def states(self) -> Tokens:
        """The state that each token from the third on was emitted in."""
        return self.tokens[:-2] * V + self.tokens[1:-1]

    def judged(self) -> tuple[Tokens, Tokens, Tokens]:
        """State, proposal and emitted token of each proposal that was judged."""
        ends = np.append(self.begins[1:], len(self.tokens))
        states, proposals, emitted = [], [], []
        first_states = self.states[self.begins - 2]
        for row in range(K):
            is_judged = self.begins + row < ends
            index = self.begins[is_judged] + row
            states.append(self.states[index - 2])
            proposals.append(self.chain.proposals[first_states[is_judged], row])
            emitted.append(self.tokens[index])
        return np.concatenate(states), np.concatenate(proposals), np.concatenate(emitted)


def chi_square_p_value(observed: Tokens, probabilities: Probabilities) -> float:
    """Groups in rows [G, C], each a sample of its own; outcomes too rare for the approximation are merged."""
    assert not observed[probabilities == 0].any()
    expected = observed.sum(axis=1, keepdims=True) * probabilities
    is_rare = expected < 5
    rest_is_small = np.where(is_rare, expected, 0).sum(axis=1) < 5
    most_likely = expected.argmax(axis=1)[:, None]

    def merge(table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rare outcomes become one, or go to the group's most likely one where they are few even together."""
        rest = np.where(is_rare, table, 0).sum(axis=1)
        merged = np.where(is_rare, 0, table)
        to_most_likely = np.take_along_axis(merged, most_likely, axis=1) + np.where(rest_is_small, rest, 0)[:, None]
        np.put_along_axis(merged, most_likely, to_most_likely, axis=1)
        return np.column_stack([merged, np.where(rest_is_small, 0, rest)])

    observed, expected = merge(observed), merge(expected)
    is_cell = expected > 0
    statistic = ((observed - expected)[is_cell] ** 2 / expected[is_cell]).sum()
    degrees = is_cell.sum() - is_cell.any(axis=1).sum()
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double()))


def overall_p_value(run: Run) -> float:
    """Every token, given its state."""
    table = np.zeros((V * V, V), dtype=np.int64)
    np.add.at(table, (run.states, run.tokens[2:]), 1)
    return chi_square_p_value(table, run.chain.target)


def acceptance_p_value(run: Run) -> float:
    """Whether a proposal is accepted, given state and proposal: with the target's probability of it."""
    states, proposals, emitted = run.judged()
    table = np.zeros((V * V * V, 2), dtype=np.int64)
    np.add.at(table, (states * V + proposals, (emitted != proposals).astype(int)), 1)
    accepted = run.chain.target.reshape(-1)
    return chi_square_p_value(table, np.stack([accepted, 1 - accepted], axis=1))


def correction_p_value(run: Run) -> float:
    """The token in place of a rejected proposal, given state and proposal: the residual."""
    states, proposals, emitted = run.judged()
    is_rejected = emitted != proposals
    table = np.zeros((V * V, V, V), dtype=np.int64)  # [state, proposal, token]
    np.add.at(table, (states[is_rejected], proposals[is_rejected], emitted[is_rejected]), 1)
    residual = np.repeat(run.chain.target[:, None, :], V, axis=1) * (1 - np.eye(V))
    mass = residual.sum(axis=-1, keepdims=True)
    residual = np.divide(residual, mass, out=np.zeros_like(residual), where=mass > 0)
    return chi_square_p_value(table.reshape(-1, V), residual.reshape(-1, V))


def pairs_p_value(run: Run) -> float:
    """Two successive tokens together, given the state before them."""
    table = np.zeros((V * V, V * V), dtype=np.int64)
    np.add.at(table, (run.states[:-1], run.tokens[2:-1] * V + run.tokens[3:]), 1)
    target = run.chain.target
    second = target.reshape(V, V, V)[np.arange(V * V) % V]  # [state, first, second]
    return chi_square_p_value(table, (target[:, :, None] * second).reshape(V * V, V * V))


def total_variation(run: Run) -> tuple[float, float]:
    """Distance of the observed distributions from the target's, mean over tokens; and what chance alone makes."""
    table = np.zeros((V * V, V))
    np.add.at(table, (run.states, run.tokens[2:]), 1)
    visits = table.sum(axis=1, keepdims=True)
    share, target = visits / visits.sum(), run.chain.target
    observed = np.divide(table, visits, out=target.copy(), where=visits > 0)
    by_chance = np.sqrt(2 * target * (1 - target) / (np.pi * np.maximum(visits, 1)))
    return float((share * abs(observed - target)).sum() / 2), float((share * by_chance).sum() / 2)


CHECKS = [overall_p_value, acceptance_p_value, correction_p_value, pairs_p_value]


@pytest.mark.parametrize(
    ("temperature", "top_p"),
    [
        pytest.param(*case, marks=() if case == (1.0, 0.8) else pytest.mark.full)
        for case in itertools.product((0.3, 1.0, 1.5), (1.0, 0.8))
    ],
)
def test_the_distribution_is_the_targets(temperature: float, top_p: float) -> None:
    chain = Chain(_C.SamplerParams(temperature=temperature, top_p=top_p, seed=1))
    run = chain.run(chain.verify_block)
    _, proposals, emitted = run.judged()
    assert 0.15 < (emitted == proposals).mean() < 0.75  # the drafter is neither perfect nor useless
    p_values = {check.__name__: check(run) for check in CHECKS}
    assert min(p_values.values()) > MIN_P_VALUE, p_values
    distance, by_chance = total_variation(run)
    assert distance < 1.1 * by_chance


@pytest.mark.full
@pytest.mark.parametrize("exclude_rejected", [True, False])
def test_the_textbook_rule_passes_and_a_draw_from_the_whole_distribution_is_seen(exclude_rejected: bool) -> None:
    chain, draw = Chain(_C.SamplerParams()), np.random.default_rng(1).random

    def emit(state: int, _: int) -> list[int]:
        block, proposals = chain.block_targets[state], chain.proposal_list(state)
        return textbook_verify(block, proposals, draw, exclude_rejected=exclude_rejected)

    run = chain.run(emit, DRAWN_TOKENS)
    if exclude_rejected:
        assert min(check(run) for check in CHECKS) > MIN_P_VALUE
        return
    distance, by_chance = total_variation(run)
    assert distance > 1.5 * by_chance
    assert max(overall_p_value(run), acceptance_p_value(run), pairs_p_value(run)) < 1e-12


@pytest.mark.full
def test_one_random_number_for_a_whole_pass_is_seen() -> None:
    chain = Chain(_C.SamplerParams())

    def emit(state: int, position: int) -> list[int]:
        emitted: list[int] = []
        for row, proposal in enumerate([*chain.proposal_list(state), -1]):
            emitted += _C.verify_block(chain.blocks[state][row : row + 1], [], chain.params, position)
            if emitted[-1] != proposal:
                break
        return emitted

    assert pairs_p_value(chain.run(emit, DRAWN_TOKENS)) < 1e-12


@pytest.mark.full
def test_random_numbers_used_twice_are_seen() -> None:
    """Positions that count passes instead of tokens."""
    chain = Chain(_C.SamplerParams())
    passes = itertools.count()
    run = chain.run(lambda state, _: chain.verify_block(state, next(passes)), DRAWN_TOKENS)
    assert pairs_p_value(run) < 1e-12


class Drawing:
    """Draws proposals from k candidates of each state, by another distribution than the target's."""

    k = 6

    def __init__(self, chain: Chain, params: Params) -> None:
        self.chain = chain
        self.params = params
        self.verify: Callable[..., list[int]] = lambda logits, proposals, position, ids, q: _C.verify_block(
            logits, proposals, chain.params, position, None, None, ids, q
        )
        self.report: Callable[[Probabilities], Probabilities] = lambda q: q
        """The distributions [K, k] that proposals were drawn from."""
        scores = chain.logits + np.random.default_rng(7).normal(0, 0.7, chain.logits.shape)
        self.ids = np.argsort(-scores, axis=1)[:, : self.k]
        weights = np.exp(np.take_along_axis(scores, self.ids, axis=1) / params.temperature)
        self.q = weights / weights.sum(axis=1, keepdims=True)

    def emit(self, state: int, position: int) -> list[int]:
        states, proposals = [state], []
        for bits in _C.uniform_bits(self.params.seed, position, K, 1):
            drawn = min(np.searchsorted(self.q[states[-1]].cumsum(), bits / 2**53, side="right"), self.k - 1)
            proposals.append(int(self.ids[states[-1], drawn]))
            states.append(states[-1] % V * V + proposals[-1])
        judged = states[:K]
        q = np.ascontiguousarray(self.report(self.q[judged]))
        return self.verify(self.chain.logits[states], proposals, position, self.ids[judged], q)


def drawing(temperature: float = 0.8, top_p: float = 1.0) -> Drawing:
    params = Params(temperature=temperature, top_p=top_p, seed=3)
    return Drawing(Chain(_C.SamplerParams(temperature=temperature, top_p=top_p, seed=3)), params)


@pytest.mark.parametrize("top_p", [pytest.param(1.0, marks=pytest.mark.full), 0.8])
def test_drawn_proposals_leave_the_distribution_the_targets(top_p: float) -> None:
    """More of them hold than of certain ones."""
    drawn = drawing(top_p=top_p)
    run = drawn.chain.run(drawn.emit, DRAWN_TOKENS)
    assert min(overall_p_value(run), pairs_p_value(run)) > MIN_P_VALUE
    certain = drawn.chain.run(drawn.chain.verify_block, DRAWN_TOKENS)
    assert len(run.begins) < 0.9 * len(certain.begins)


def without_subtraction(drawn: Drawing) -> None:
    drawn.verify = lambda logits, proposals, position, ids, q: reference.verify_drawn(
        logits, proposals, drawn.params, position, (), (), ids, q, subtract=False
    )


def of_the_next_position(drawn: Drawing) -> None:
    drawn.report = lambda q: np.roll(q, 1, axis=0)


def of_another_temperature(drawn: Drawing) -> None:
    drawn.report = lambda q: (q**2) / (q**2).sum(axis=1, keepdims=True)


@pytest.mark.full
@pytest.mark.parametrize("plant", [without_subtraction, of_the_next_position, of_another_temperature])
def test_a_wrong_distribution_is_seen(plant: Callable[[Drawing], None]) -> None:
    drawn = drawing()
    plant(drawn)
    assert overall_p_value(drawn.chain.run(drawn.emit, TOKENS_THAT_SHOW)) < 1e-12


@pytest.mark.full
def test_one_number_for_proposal_and_acceptance_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposal that is drawn with the number that judges it."""

    def judging(seed: int, position: int, count: int, draw: int) -> list[int]:
        return [reference.uniform_bits(seed, position + i, 2) for i in range(count)]

    monkeypatch.setattr(_C, "uniform_bits", judging)
    drawn = drawing()
    assert overall_p_value(drawn.chain.run(drawn.emit, TOKENS_THAT_SHOW)) < 1e-12
