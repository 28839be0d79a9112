# SPDX-License-Identifier: Apache-2.0
"""Fake quantisation against what really packs: the C++ packers and, for activations, the lowered graphs' formulas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dflash_trt import _C
from dflash_trt.quantize.scales import scale_of
from dflash_trt.runtime.measure.recovery.fake_quantization import quantised_input, quantised_rows, quantised_weight
from tests.quantize.samples import unpacked_fp8, unpacked_nvfp4

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def samples(dtype: torch.dtype) -> torch.Tensor:
    """[64, 96]: every magnitude from nothing to large, ties of both formats, zero blocks and negative zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator) * torch.logspace(-6, 0, 64)[:, None]
    x[0] = 0
    x[1, ::2] = -0.0
    x[2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 12) / 6  # halfway between E2M1's code points
    x[3] = torch.linspace(-1, 1, 96)
    x[4, :16] = 2.0**-14
    return x.to(dtype)


def bits(x: torch.Tensor) -> np.ndarray:
    return (x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()).copy()


def packed_nvfp4(x: torch.Tensor, scale: np.float32) -> torch.Tensor:
    rows, columns = x.shape
    data, scales = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // 16), np.uint8)
    _C.pack_nvfp4(bits(x), float(scale), data, scales, threads=1)
    return torch.from_numpy(unpacked_nvfp4(data, scales, float(scale)))


def packed_fp8(x: torch.Tensor, scale: np.float32) -> torch.Tensor:
    codes = np.empty(x.shape, np.uint8)
    _C.pack_fp8(bits(x), float(scale), codes, threads=1)
    # The graphs hold FP8's scales in BF16.
    return torch.from_numpy(unpacked_fp8(codes, torch.tensor(scale).bfloat16().item()))


PACKERS: dict[str, Callable[[torch.Tensor, np.float32], torch.Tensor]] = {
    "FP8": packed_fp8, "NVFP4": packed_nvfp4, "W4A16_NVFP4": packed_nvfp4,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", PACKERS)
@pytest.mark.parametrize("amax", [1.0, 0.3, 77.0])  # of the group: larger than the tensor's own, or smaller
def test_weights_are_what_the_packers_make_of_them(algorithm: str, dtype: torch.dtype, amax: float) -> None:
    weight, scale = samples(dtype), scale_of(algorithm, amax)
    found = quantised_weight(weight, algorithm, float(scale))
    assert torch.equal(found, PACKERS[algorithm](weight, scale))
    assert len(found.unique()) > 50


@pytest.mark.parametrize("amax", [1.0, 3.0])
def test_activations_are_rounded_as_weights_are(amax: float) -> None:
    """In FLOAT both formulas agree but for blocks whose scale underflows."""
    x, scale = samples(torch.float32), scale_of("NVFP4", amax)
    ratios = x.abs().view(64, -1, 16).amax(-1).div(6 * float(scale)).repeat_interleave(16, dim=1)
    found, expected = quantised_input(x, "NVFP4", float(scale)), packed_nvfp4(x, scale)
    clear = ratios >= 2.0**-9
    assert 0.2 < clear.float().mean() < 1
    assert torch.equal(found[clear], expected[clear])
    assert not found[ratios < 2.0**-11].any()
    rounded = torch.tensor(scale_of("FP8", amax)).bfloat16().float()
    fp8 = (x / rounded).clamp(-448, 448).to(torch.float8_e4m3fn).float() * rounded
    assert torch.equal(quantised_input(x, "FP8", float(scale_of("FP8", amax))), fp8)
    assert torch.equal(quantised_rows(x, float(scale_of("FP8", amax))), fp8)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_gradients_pass_straight_through(algorithm: str) -> None:
    x = samples(torch.float32).requires_grad_()
    gradient = torch.randn(x.shape)
    (quantised_input(x, algorithm, 0.001) * gradient).sum().backward()
    assert torch.equal(x.grad, gradient)
    (quantised_rows(x, 0.001) * gradient).sum().backward()
    assert torch.equal(x.grad, 2 * gradient)
