# SPDX-License-Identifier: Apache-2.0
"""Weights that try a packer: float32 values, to be rounded to the type under test."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

E2M1_TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
E4M3_TIES = [(k + 0.5) * 2.0**-9 for k in range(8)] + [
    (1 + (k + 0.5) / 8) * 2.0**e for e in range(-6, 9) for k in range(8 if e < 8 else 6)
]


def _near(values: list[float], step: float) -> Array:
    """Each value, and it moved by one part in 1 / step either way."""
    exact = np.array(values)
    return np.concatenate([exact * (1 - step), exact, exact * (1 + step)]).astype(np.float32)


def cases(rows: int, columns: int, *, step: float, smallest: float) -> dict[str, Array]:
    """Named weights [rows, columns].

    `step` is the type's spacing at 1, `smallest` its least subnormal.
    """
    rng = np.random.default_rng(20)
    shape = (rows, columns)
    normal = rng.standard_normal(shape).astype(np.float32)
    signs = rng.choice(np.array([-1, 1], np.float32), shape)

    # A largest weight of 2688 / 64 makes the global scale 1 / 64, and 6 in a block its scale 1 / scale_2.
    nvfp4_ties = rng.choice(_near([0, *E2M1_TIES, 6], step), shape)
    nvfp4_ties[:, ::16] = 6
    nvfp4_ties *= np.exp2(rng.integers(-6, 3, (rows, columns // 16))).repeat(16, axis=1)
    nvfp4_ties[0, 0] = 2688 / 64

    fp8_ties = rng.choice(_near([0, *E4M3_TIES, 448], step), shape)
    fp8_ties[0, 0] = 448

    zeros = normal * 0.02
    zeros[::3] = 0
    zeros[1::3, : columns // 2] *= 0  # keeps the signs: -0.0
    spread = normal * np.exp2(rng.integers(-24, 8, (rows, columns // 16))).repeat(16, axis=1)
    # Still subnormal in float32; the scale of yet smaller weights would be 0.
    subnormal = rng.integers(-100, 101, shape) * max(smallest, 2.0**-133)
    return {
        "normal": normal * np.float32(0.02),
        "heavy": np.clip(rng.standard_t(1.5, shape) * 0.02, -100, 100).astype(np.float32),
        "tiny": normal * np.float32(1e-6),
        "nvfp4_ties": nvfp4_ties.astype(np.float32) * signs,
        "fp8_ties": fp8_ties / np.float32(64) * signs,
        "zeros": zeros,
        "spread": spread.astype(np.float32) / np.float32(16),
        "subnormal": subnormal.astype(np.float32),
    }
