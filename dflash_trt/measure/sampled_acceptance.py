# SPDX-License-Identifier: Apache-2.0
"""Expected acceptance when sampling at a temperature T, from answers whose log probabilities were recorded.

A proposal d_k is accepted where it is the token that the target draws (docs/sampling.md), so behind a recorded prefix

    E[accepted] = sum over k of p_T(d_1) p_T(d_2 | d_1) ... p_T(d_k | d_<k)

and p_T is known as far as the proposals are the recorded text x, and one token beyond. With j the first proposal that
is not the recorded token, a pass over text that was sampled at T0 contributes at position k

    w_k p_T(d_k | x_<k)                               for k <= j where d_k is among the recorded top N
    w_k p_T(x_k | x_<k) / p_T0(x_k | x_<k), or 0      for k < j, or k = j, where it is not
    0                                                 for k > j

with w_k = product over i < k of p_T(x_i) / p_T0(x_i). Its mean over x is E[accepted at k]: the text before k is drawn
with p_T0, and the weights make p_T of it; which of the first two lines holds does not depend on x_k. At T = T0 the
ratios are 1, and the sum over the passes of a text has the mean of what decoding accepts.

Greedy text (T0 = 0) is no sample: 1 stands for its p_T0, what is behind j is unknown and counts as 0 in the lower
bound and as accepted in the upper one, and so does a d_j without a record, as far as the tail allows.

The normaliser of p_T0 is recorded. That of another T lies between two values, as the tokens without a record share the
tail's mass, none with more than the last of the top N has; so there are bounds. Nothing is renormalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec
import numpy as np
import numpy.typing as npt

from dflash_trt.measure.replay import Replayed
from dflash_trt.measure.statistics import Mean, TauLoss, pooled_loss, pooled_mean
from dflash_trt.quantize.features import AnswerLogprobs, FeatureFile
from dflash_trt.runtime.request import Step

Bounds = tuple[float, float]
"""What a figure is at least and at most."""
Floats = npt.NDArray[np.float64]
LOW, HIGH = 0, 1


class ExpectedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """One draft position of the block."""

    position: int
    """1 is the first proposal."""
    judged: int
    """Verify passes that judged a proposal here."""
    low: float | None
    """Least expected share that accepted it, and so all before it; None when nothing was judged."""
    high: float | None


class ExpectedTau(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts accepted in a pass, and the bonus: over all passes together, between two bounds."""

    low: Mean
    """With its interval over prompts."""
    high: Mean


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What sampling at `temperature` is expected to accept of one engine's proposals."""

    temperature: float
    tau: ExpectedTau | None
    """None without a verify pass."""
    acceptance: list[ExpectedPosition]


class ExpectedLoss(msgspec.Struct, frozen=True, kw_only=True):
    """By how much expected tau falls short of the reference's: between two bounds, each with its interval."""

    low: TauLoss
    high: TauLoss


class PromptSums(msgspec.Struct, frozen=True, kw_only=True):
    """Contributions of one prompt's passes."""

    bounds: Floats
    """[2, K]: lower and upper, by draft position."""
    judged: npt.NDArray[np.int64]
    """[K]: passes that judged a proposal there."""
    passes: int


def prompt_sums(features: FeatureFile, replays: Sequence[Replayed], T: float, num_drafts: int) -> list[PromptSums]:
    """Of each sequence, all of which were replayed; raises CheckpointError for impossible log probabilities."""
    facts = features.facts
    sums = []
    for i, replayed in enumerate(replays):
        answer = features.answer(i)[0].tolist()
        distributions = Distributions(features.logprobs(i), answer, facts.target.vocab_size, facts.temperature)
        sums.append(sums_of_steps(replayed.steps, distributions, T, num_drafts))
    return sums


def sums_of_steps(steps: Sequence[Step], distributions: Distributions, T: float, num_drafts: int) -> PromptSums:
    """Adds up the passes that decode the distributions' answer."""
    bounds, judged = np.zeros((2, num_drafts)), np.zeros(num_drafts, np.int64)
    place = 1  # the prefill emits the first token
    for step in steps:
        was_cut = step.accepted == len(step.token_ids)  # at its stop token: nothing behind it was judged
        proposals = step.proposals[: step.accepted] if was_cut else step.proposals
        bounds[:, : len(proposals)] += _contributions(proposals, place, distributions, T)
        judged[: len(proposals)] += 1
        place += len(step.token_ids)
    return PromptSums(bounds=bounds, judged=judged, passes=len(steps))


def _contributions(proposals: Sequence[int], place: int, distributions: Distributions, T: float) -> Floats:
    """Of one pass whose first proposal stands at `place`: lower and upper [2, K], by position."""
    bounds, weight = np.zeros((2, len(proposals))), np.ones(2)
    for k, proposal in enumerate(proposals):
        is_recorded = proposal == distributions.answer[place + k]
        ratio = distributions.ratio(place + k, T) if is_recorded else (0.0, 0.0)
        is_known = distributions.is_greedy or distributions.is_top(place + k, proposal)
        bounds[:, k] = weight * (distributions.probability(place + k, proposal, T) if is_known else ratio)
        if not is_recorded:
            if distributions.is_greedy:
                bounds[HIGH, k:] = bounds[HIGH, k]
            break
        weight = weight * ratio
    return bounds


class Distributions:
    """The target's distributions at an answer's m places, as far as they were recorded."""

    def __init__(self, recorded: AnswerLogprobs, answer: Sequence[int], vocab_size: int, temperature: float) -> None:
        """`answer` [m]: the recorded tokens, of text at `temperature`."""
        self.answer = answer
        self._temperature, self._log_normaliser = temperature, recorded.log_normaliser
        self._own, self._top = recorded.own.double().numpy(), recorded.top.double().numpy()
        self._ids = recorded.top_token_ids.tolist()
        self._tail_mass = recorded.tail_mass.double().numpy()
        self._num_tail = vocab_size - self._top.shape[1]
        self._sums = cache(self._sums_at)

    @property
    def is_greedy(self) -> bool:
        """Whether the answer is no sample."""
        return self._temperature == 0

    def is_top(self, place: int, token: int) -> bool:
        """Whether the token is among the N that were recorded at the place."""
        return token in self._ids[place]

    def ratio(self, place: int, T: float) -> Bounds:
        """Between what p_T(x) / p_T0(x) lies for the recorded token x, with p_T0 = 1 for greedy text."""
        if (recorded := self._temperature) == T:
            return 1.0, 1.0
        low, high = self.probability(place, self.answer[place], T)
        least, most = (1.0, 1.0) if self.is_greedy else self.probability(place, self.answer[place], recorded)
        return low / most, high / least

    def probability(self, place: int, token: int, T: float) -> Bounds:
        """Between what p_T(token) lies at a place."""
        top, low, high = (float(values[place]) for values in self._sums(T))
        if token == self.answer[place]:
            logprob = self._own[place]
        elif token in self._ids[place]:
            logprob = self._top[place, self._ids[place].index(token)]
        else:
            largest = min(self._tail_mass[place], np.exp(self._top[place, -1]))
            weight = float((largest / np.exp(self._top[place, 0])) ** (1 / T))
            return 0.0, weight / max(low, top + weight)
        weight = float(np.exp((logprob - self._top[place, 0]) / T))
        return weight / high, weight / low

    def _sums_at(self, T: float) -> tuple[Floats, Floats, Floats]:
        """By place, in units of the likeliest token's p^(1/T): the top's sum, and the least and most of all tokens'.

        x^(1/T) bends to one side: the tail's sum is at one end when its tokens share its mass evenly, and at the other
        when as few as can be have it, each with as much as the last of the top.
        """
        first, last = self._top[:, 0], self._top[:, -1]
        top = np.exp((self._top - first[:, None]) / T).sum(1)
        if self._temperature == T and self._log_normaliser is not None:
            exact = np.exp(self._log_normaliser.double().numpy() - first / T)
            return top, exact, exact
        count = max(self._num_tail, 1)
        even = count * (self._tail_mass / count / np.exp(first)) ** (1 / T)
        uneven = self._tail_mass / np.exp(last) * np.exp((last - first) / T)
        return top, top + np.minimum(even, uneven), top + np.maximum(even, uneven)


def expected(T: float, prompts: Sequence[PromptSums], num_drafts: int) -> Expected:
    """The figures of one engine."""
    judged = sum((prompt.judged for prompt in prompts), np.zeros(num_drafts, np.int64))
    bounds = sum((prompt.bounds for prompt in prompts), np.zeros((2, num_drafts)))
    positions = [
        ExpectedPosition(position=k, judged=n, low=low / n if n else None, high=high / n if n else None)
        for k, (n, low, high) in enumerate(zip(judged.tolist(), *bounds.tolist(), strict=True), start=1)
    ]
    with_passes = [prompt for prompt in prompts if prompt.passes]
    low, high = (pooled_mean(_tokens(with_passes, side)) for side in (LOW, HIGH))
    tau = None if low is None or high is None else ExpectedTau(low=low, high=high)
    return Expected(temperature=T, tau=tau, acceptance=positions)


def expected_loss(prompts: Sequence[PromptSums], reference: Sequence[PromptSums]) -> ExpectedLoss | None:
    """Of an engine against its reference on the same prompts; None without a verify pass."""
    pairs = [(a, b) for a, b in zip(prompts, reference, strict=True) if a.passes and b.passes]
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    low = pooled_loss(_tokens(ours, HIGH), _tokens(theirs, LOW))
    high = pooled_loss(_tokens(ours, LOW), _tokens(theirs, HIGH))
    return None if low is None or high is None else ExpectedLoss(low=low, high=high)


def _tokens(prompts: Sequence[PromptSums], side: int) -> tuple[list[float], list[float]]:
    """By prompt: accepted drafts and bonus tokens of its passes, and their number."""
    return [p.passes + float(p.bounds[side].sum()) for p in prompts], [float(p.passes) for p in prompts]
