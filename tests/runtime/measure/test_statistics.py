# SPDX-License-Identifier: Apache-2.0
"""The statistics of `verify`, by values that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dflash_trt.runtime.measure.statistics import first_difference, relative_error, tau_loss


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2, 3], [1, 9, 3], (1, 2, 9)),
        ([1, 2], [1], (1, 2, None)),
        ([1], [1, 2], (1, None, 2)),
        ([], [7], (0, None, 7)),
    ],
)
def test_first_difference(expected: list[int], found: list[int], difference: tuple[int | None, ...] | None) -> None:
    result = first_difference(expected, found)
    assert (result and (result.position, result.expected, result.found)) == difference


def test_tau_loss_of_two_prompts() -> None:
    """Resamples are (1,1), (1,2) and (2,2), with chances 1/4, 1/2 and 1/4: the ends of the interval are exact."""
    measured = tau_loss([1.0, 3.0], [2.0, 4.0])
    assert measured is not None
    assert measured.loss == pytest.approx(1 - 2 / 3)
    assert (measured.low, measured.high) == (pytest.approx(1 - 3 / 4), pytest.approx(1 - 1 / 2))
    assert measured == tau_loss([1.0, 3.0], [2.0, 4.0])


@pytest.mark.parametrize(
    ("tau", "reference", "loss"), [([2.0], [4.0], 0.5), ([3.0, 3.0], [2.0, 2.0], -0.5), ([], [], None)]
)
def test_tau_loss_of_few_prompts(tau: list[float], reference: list[float], loss: float | None) -> None:
    """A gain is a negative loss; a single prompt has no interval."""
    measured = tau_loss(tau, reference)
    assert (measured and measured.loss) == loss
    if measured is not None:
        assert (measured.low is None, measured.num_prompts) == (len(tau) == 1, len(tau))


def test_tau_loss_is_paired() -> None:
    """Prompts differ much, engines by one half on each: the interval must not see the prompts' spread."""
    reference = np.linspace(2, 10, 50)
    measured = tau_loss((reference / 2).tolist(), reference.tolist())
    assert measured is not None
    assert measured.loss == measured.low == measured.high == 0.5


def test_tau_loss_interval_is_the_textbooks() -> None:
    generator = np.random.default_rng(1)
    reference = np.full(400, 4.0)
    taus = reference + generator.normal(-0.2, 0.5, 400)
    measured = tau_loss(taus.tolist(), reference.tolist())
    assert measured is not None
    assert measured.low is not None
    assert measured.high is not None
    half_width = 1.96 * taus.std() / math.sqrt(400) / 4
    assert measured.high - measured.low == pytest.approx(2 * half_width, rel=0.05)


def test_relative_error() -> None:
    one, other = (torch.tensor(values) for values in ([[3.0, 4], [0, 0]], [[3.0, 0], [0, 4]]))
    assert relative_error(one, one) == 0
    assert relative_error(one, other) == pytest.approx(math.sqrt(32) / 5)
    zero = torch.zeros(3)
    assert relative_error(zero, zero) == 0
    assert relative_error(zero + 1, zero) == math.inf
    large = torch.full((4,), 3e38)  # squares overflow FLOAT
    assert relative_error(large / 2, large) == pytest.approx(0.5)
