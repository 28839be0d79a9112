# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM or SGLang reads a quantised draft, and whether the GPU computes in its formats."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.quantized_drafts import READERS, lowest_gpu, unread, weights_only_below
from dflash_trt.deploy.rules.checked_config import BLOCKS, CheckedConfig, error, unchecked, warning
from dflash_trt.deploy.schema import PACKAGES

RULE = "quantized-draft"


def quantized_draft(config: CheckedConfig) -> Iterator[Finding]:
    """The formats of the draft's layers against the runtime's reader and the GPU."""
    runtime, formats = config.runtime, sorted(set(config.served.algorithms.values()))
    if not formats or runtime not in READERS or config.method not in BLOCKS:
        return
    key, listed = config.keys.draft, ", ".join(formats)
    if (problem := unread(runtime, formats)) is not None:
        fix = "quantise it with --recipe nvfp4 or fp8, or serve it with our engines"
        yield error(RULE, key, "formats that the runtime reads", f"{listed}: {problem}", fix)
        return
    lowest, computing = lowest_gpu(runtime, formats), weights_only_below(formats)
    if config.served.gpus is None:
        yield unchecked(RULE, key, f"whether the GPU computes in {listed}", "give --gpus")
        return
    gpu = config.served.gpus.gpu
    if lowest is not None and gpu.compute_capability < lowest:
        yield error(
            RULE, key, f"SM {_version(lowest)} or later for {listed} in {PACKAGES[runtime]}", f"{gpu.name} ({gpu.sm})",
            "serve the draft in BF16: its dense original, or --recipe bf16",
        )  # fmt: skip
    elif computing is not None and gpu.compute_capability < computing:
        yield warning(
            RULE, key, f"SM {_version(computing)} or later, which computes in {listed}",
            f"{gpu.name} ({gpu.sm}): Marlin's kernels dequantise the weights there, so that bytes are saved and no"
            " arithmetic", "compare its speed with the draft in BF16",
        )  # fmt: skip


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
