# SPDX-License-Identifier: Apache-2.0
"""GPUs that the attention kernel of a build runs on."""

from __future__ import annotations

import pytest
import torch

from dflash_trt.device.attention_kernel import check_kernels, runs_on
from dflash_trt.errors import MissingDependencyError
from tests.checkpoint.samples import refusal
from tests.plugins.test_compile import ARCHITECTURES, MACHINE_CODE


def test_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("dflash_trt._C.cuda_architectures", lambda: ["100f"])
    message = refusal(lambda: check_kernels(torch.device("cuda")), MissingDependencyError)
    assert "attention kernel: expected one for compute capability 9.0, found 100f" in message
    assert "DFLASH_CUDA=ON" in message
    monkeypatch.setattr("dflash_trt._C.cuda_architectures", lambda: ["90a"])
    check_kernels(torch.device("cuda"))


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((7, 5), False), ((8, 0), True), ((8, 6), True), ((8, 7), True), ((8, 9), True), ((9, 0), True),
        ((10, 0), True), ((10, 3), True), ((12, 0), True), ((12, 1), True),
    ],
)  # fmt: skip
def test_the_gpus_that_the_architectures_are_for(capability: tuple[int, int], runs: bool) -> None:
    """A100 is 8.0, L40S 8.9, H100 and H200 are 9.0, DGX B300 is 10.3, RTX 5090 12.0, DGX Spark 12.1; nothing is left to
    compile at run time.
    """
    assert runs_on(MACHINE_CODE, *capability) == runs
    assert not runs_on(("103a",), 10, 0)
    assert not runs_on(("89",), 8, 6)


def test_later_gpus_run_what_their_driver_compiles() -> None:
    for capability in ((11, 0), (13, 0)):
        assert not runs_on(MACHINE_CODE, *capability)
        assert runs_on(ARCHITECTURES, *capability)
    assert not runs_on(ARCHITECTURES, 7, 5)
