# SPDX-License-Identifier: Apache-2.0
"""Quantised drafts that a runtime loads: those seen to load, not those that a format would allow."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from dflash_trt.checkpoint.number_formats import FORMATS, FP8, NVFP4

Runtime = Literal["engine", "trtllm-native", "vllm-0.33", "vllm-0.32"]


class Loadable(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts that one runtime loads."""

    formats: tuple[str, ...]
    """Algorithms of quantised layers."""
    dense: str | None
    """Regular expression of the modules that must stay dense; None where all may be quantised."""
    is_mixed: bool
    """Whether layers of one checkpoint may have different algorithms."""
    has_fp8_context: bool
    """Whether the checkpoint may hold the scales of an FP8 context cache."""

    def allows(self, module: str, algorithm: str) -> bool:
        """Whether the runtime loads the linear layer `module` in that algorithm."""
        return algorithm in self.formats and not (self.dense and re.fullmatch(self.dense, module))


LOADABLE: dict[Runtime, Loadable] = {
    # Our own engines: ONNX Runtime here, TensorRT plans (not yet run).
    "engine": Loadable(formats=tuple(FORMATS), dense=None, is_mixed=True, has_fp8_context=True),
    # The context projection multiplies q, k and v's raw BF16 weights, and fc is a plain nn.Linear (source, 1.3.0rc).
    # Not yet run; several algorithms in one draft have not been looked up.
    "trtllm-native": Loadable(
        formats=(FP8, NVFP4), dense=r"fc|.*\.self_attn\.[qkv]_proj", is_mixed=False, has_fp8_context=False
    ),
    # Run on a CPU with the fixtures: fp8, nvfp4, nvfp4-native and, by 0.33 only, mixed-nvfp4-fp8. The kernel of
    # W4A16_NVFP4 needs a GPU; a quantised fc and FP8 context scales were not tried.
    "vllm-0.33": Loadable(formats=(FP8, NVFP4), dense="fc", is_mixed=True, has_fp8_context=False),
    "vllm-0.32": Loadable(formats=(FP8, NVFP4), dense="fc", is_mixed=False, has_fp8_context=False),
}
