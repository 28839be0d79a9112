# SPDX-License-Identifier: Apache-2.0
"""The compiled module (cpp/). It takes arrays where they lie, copies nothing and releases the GIL."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_Weights: TypeAlias = NDArray[np.uint16] | NDArray[np.float16] | NDArray[np.float32]
"""[R, K], C-contiguous, at any alignment, read-only memory maps included; uint16 holds BF16's bits."""

class NonFiniteError(ValueError):
    """A weight is NaN or infinite; the message gives its flat index, row and column."""

def accept_greedy(proposals: list[int], verified: list[int]) -> int:
    """Length of the longest prefix of proposals [K] that equals the target's choices, verified [K + 1].

    Raises ValueError unless verified is one longer than proposals.
    """

def cpu_features() -> list[str]:
    """Instruction sets the packers can use here, best first: of "avx512", "avx2", "scalar".

    The first is what isa="best" chooses. All write the same bytes.
    """

def amax(weights: _Weights, threads: int = 0, isa: str = "best") -> float:
    """max |w|, exactly; 0 for an empty tensor. threads=0 takes all that the hardware has.

    The scales that modelopt 0.47 exports are, in float32,

        FP8:    scale   = amax / 448
        NVFP4:  scale_2 = amax / 2688        (6 * 448)

    Raises NonFiniteError.
    """

def pack_fp8(weights: _Weights, scale: float, out: NDArray[np.uint8], threads: int = 0, isa: str = "best") -> None:
    """Fills out [R, K] with e4m3 codes of w / scale.

        out = e4m3(dtype(float32(w) / scale))        dtype: the weights' own

    Rounds to nearest even, twice as modelopt 0.47 does, and saturates at +-448.

    Raises ValueError for another shape of out or a scale that is not positive and finite (float32), and
    NonFiniteError, after which out holds anything; TypeError where an array would have to be copied.
    """

def pack_nvfp4(
    weights: _Weights,
    scale_2: float,
    out_data: NDArray[np.uint8],
    out_scales: NDArray[np.uint8],
    threads: int = 0,
    isa: str = "best",
) -> None:
    """Fills out_data [R, K / 2] with e2m1 pairs and out_scales [R, K / 16] with e4m3 block scales.

        s      = max |w of the block of 16| / (6 * scale_2), or 1 where that is 0
        scale  = e4m3(clamp(s, 2^-9, 448))
        code   = e2m1(w / (scale * scale_2))         saturating at +-6; an exact zero has no sign
        data   = code[even] | code[odd] << 4

    All in float32, rounding to nearest even, as modelopt 0.47 does. Weights that are to be fused take
    one scale_2, from the largest amax among them.

    Raises as pack_fp8 does, and ValueError where 16 does not divide K.
    """
