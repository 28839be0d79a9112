# SPDX-License-Identifier: Apache-2.0
"""Activation ranges read on a GPU, against ONNX Runtime's in FLOAT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fixtures_data import PAIRS
from tests.runtime.measure.test_calibrate import BF16_NOISE, largest_replayed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", PAIRS)
def test_ranges_are_those_of_a_cpu(name: str, features: dict[str, Path]) -> None:
    expected = largest_replayed(name, features[name])
    assert largest_replayed(name, features[name], torch.device("cuda")) == pytest.approx(expected, rel=BF16_NOISE)
