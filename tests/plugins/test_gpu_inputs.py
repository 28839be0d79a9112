# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu gives the kernels, made where no GPU is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu.test_kernel import CHAIN, reading
from tests.gpu.test_sanitizer import calls
from tests.plugins.calls import reference
from tests.plugins.compare import assert_close
from tests.plugins.kernel.oracle import expect
from tests.plugins.tensors import draw


def test_a_call_reads_the_output_of_the_call_in_front() -> None:
    first, other = draw(CHAIN), draw(replace(CHAIN, seed=1))
    chained = reading(other, reference(CHAIN, first))
    assert_close(reference(CHAIN, chained), *expect(CHAIN, chained))
    with pytest.raises(AssertionError):
        assert_close(reference(CHAIN, chained), *expect(CHAIN, other))


@pytest.mark.parametrize(("capability", "kernels"), [((9, 0), {"best", "mma", "wgmma"}), ((10, 3), {"best"})])
def test_the_sanitizer_sees_every_kernel_of_the_gpu(capability: tuple[int, int], kernels: set[str]) -> None:
    assert {kernel for _, _, kernel in calls(capability)} == kernels
