# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM or SGLang reads a quantised draft, and whether the GPU computes in its formats.

vLLM 0.33.0: QUANT_ALGOS and get_min_capability in vllm/model_executor/layers/quantization/modelopt.py, kernels/linear
for the fall-backs. SGLang 0.5.23: _parse_modelopt_quant_config in configs/model_config.py, get_min_capability in
layers/quantization/modelopt_quant.py. docs/quantization.md's table is made from this one (tools/quantization_page.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from dflash_trt.checkpoint.number_formats import FORMATS, FP8, INT4, NVFP4, W4A16_NVFP4
from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.rules.checked_config import BLOCKS, CheckedConfig, error, unchecked, warning
from dflash_trt.deploy.schema import PACKAGES, Runtime

MIXED = "MIXED_PRECISION"
"""modelopt's name for a checkpoint with several formats."""


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """One runtime's reader of modelopt's files."""

    release: str
    lowest: dict[str, tuple[int, int]]
    """First GPUs for which each format loads; those that are missing are refused."""
    mixed_needs: tuple[str, ...] = ()
    """Formats of which a mixed checkpoint must hold one; any do if empty."""


READERS: dict[Runtime, Reader] = {
    "vllm": Reader(release="0.33", lowest={FP8: (8, 0), NVFP4: (7, 5), W4A16_NVFP4: (7, 5), MIXED: (7, 5)}),
    "sglang": Reader(
        release="0.5.23", lowest={FP8: (8, 9), NVFP4: (8, 0), W4A16_NVFP4: (8, 0), MIXED: (8, 0)},
        mixed_needs=(NVFP4, W4A16_NVFP4),
    ),
}  # fmt: skip
CALLED = {INT4: "INT4 (modelopt's W4A16_AWQ)"}


def unread(runtime: Runtime, algorithms: Collection[str]) -> str | None:
    """Why a runtime refuses these formats on any GPU; None if it reads them, or its reader was not looked up."""
    reader = READERS.get(runtime)
    if reader is None:
        return None
    name = f"{PACKAGES[runtime]} {reader.release}"
    for algorithm in sorted(algorithms):
        if algorithm not in reader.lowest:
            return f"{name}'s reader of modelopt's files has no {CALLED.get(algorithm, algorithm)}"
    if len(set(algorithms)) > 1 and reader.mixed_needs and not set(algorithms) & {*reader.mixed_needs}:
        return f"{name} reads several formats of one draft only with NVFP4 among them"
    return None


def lowest_gpu(runtime: Runtime, algorithms: Collection[str]) -> tuple[int, int] | None:
    """The first GPU for which a runtime loads a draft of these formats; None if its reader was not looked up."""
    reader = READERS.get(runtime)
    if reader is None or not algorithms:
        return None
    kinds = [MIXED] if len(set(algorithms)) > 1 else [*algorithms]
    return max(reader.lowest[kind] for kind in kinds)


def weights_only_below(algorithms: Collection[str]) -> tuple[int, int] | None:
    """The first GPU that computes in all of these formats; older ones dequantise the weights (Marlin)."""
    computing = [each.lowest_sm for each in map(FORMATS.get, algorithms) if each and each.quantises_input]
    return max((lowest for lowest in computing if lowest is not None), default=None)


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
