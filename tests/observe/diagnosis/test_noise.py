# SPDX-License-Identifier: Apache-2.0
"""What counts as more than noise, against hand-computed bounds."""

from __future__ import annotations

import math
import random

import pytest

from dflash_trt.observe.diagnosis.noise import is_first_compared, is_share_below, paired_loss, upper_bound
from tests.observe.diagnosis.samples import group


def test_upper_bound_by_hand() -> None:
    # mean 2.5, variance 5/3, error sqrt(5/12), t(3) = 12.92
    assert upper_bound([1, 2, 3, 4]) == pytest.approx(2.5 + 12.92 * math.sqrt(5 / 12))
    assert upper_bound([1, 1, 1]) == math.inf


def test_paired_loss_by_hand() -> None:
    before = {"a": 2.0, "b": 1.0, "c": 3.0, "d": 2.0}
    after = {name: value * 0.9 for name, value in before.items()}
    # 2 * -0.1 / 1.9 for each: no scatter
    assert paired_loss(after, before, 0.05) == pytest.approx(0.1)
    assert paired_loss(after, before, 0.11) is None
    assert paired_loss(before, after, 0.05) is None
    assert paired_loss({"a": 0.0}, before, 0.05) is None
    # -.105 -.182 -.069 -.105: mean -.1155, error .0477 / 2, t(3) * error = .308: noise
    assert paired_loss({name: value - 0.2 for name, value in before.items()}, before, 0.05) is None


def test_a_collapse_is_seen_beside_an_easy_prompt() -> None:
    """Figures measured with a prefix cache that loses features: the mean of plain differences scatters too much."""
    before = dict(zip("abcdefgh", (0.64, 0.52, 0.24, 0.39, 0.18, 0.21, 2.36, 0.64), strict=True))
    after = dict.fromkeys(before, 0.0) | {"g": 0.02}
    assert paired_loss(after, before, 0.05) == pytest.approx(1 - 0.02 / 5.18)
    assert paired_loss(dict.fromkeys(before, 0.0), dict.fromkeys(before, 0.0), 0.05) is None


def test_noise_is_no_finding() -> None:
    """Two of 4000 comparisons of equals would be expected at 99.95 %."""
    generator = random.Random(0)
    found = 0
    for _ in range(4000):
        one, other = ([generator.gauss(2, 0.5) for _ in range(12)] for _ in range(2))
        names = [str(index) for index in range(12)]
        found += paired_loss(dict(zip(names, one, strict=True)), dict(zip(names, other, strict=True)), 0) is not None
    assert found <= 8


def test_share_below() -> None:
    reference = [1.5, 1.6, 1.4, 1.5, 1.6, 1.4]
    assert is_share_below([0.05, 0.06, 0.04, 0.05], reference, 0.2)
    assert not is_share_below([0.28, 0.3, 0.26, 0.29], reference, 0.2)
    assert not is_share_below([0.0, 0.1, 0.5, 0.0], reference, 0.2)  # below on average, and too noisy to say so
    assert not is_share_below([0.0, 0.0, 0.0], reference, 0.2)


def test_drafts_of_other_lengths_are_compared_by_the_first() -> None:
    assert not is_first_compared(group("a"), group("b"))
    assert is_first_compared(group("a"), group("b", draft_length=3))
