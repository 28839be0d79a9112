# SPDX-License-Identifier: Apache-2.0
"""Scales of quantised layers: from ranges of weights and activations, common where GEMMs are fused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from dflash_trt._C import NonFiniteError, amax
from dflash_trt.checkpoint.decoded_tensor import map_tensor
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.number_formats import FORMATS, FP8
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.bounds import CAPTURE, Ranges

SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


def scale_groups(spec: DraftSpec) -> list[tuple[str, ...]]:
    """The linear layers that share scales, as their GEMMs are joined: all q, k and v; a layer's gate and up."""
    qkv = tuple(f"{attention}.{x}_proj" for attention in spec.attention_modules() for x in "qkv")
    groups = [qkv]
    groups += [tuple(f"layers.{i}.mlp.{x}_proj" for x in ("gate", "up")) for i in range(len(spec.layers))]
    grouped = {module for group in groups for module in group}
    return groups + [(module,) for module in spec.linear_modules() if module not in grouped]


def weight_scales(draft: DraftCheckpoint, algorithms: Mapping[str, str], *, threads: int) -> dict[str, np.float32]:
    """Scale of the whole tensor by quantised module that has one: the same in a group of `scale_groups` and algorithm.

    Raises CheckpointError for a weight that is NaN or infinite.
    """

    def module_amax(module: str) -> float:
        tensor = draft.weights[f"{module}.weight"]
        with naming(tensor):
            return amax(map_tensor(tensor), threads=threads)

    return group_scales(draft.spec, scaled_by_tensor(algorithms), module_amax)


def scaled_by_tensor(algorithms: Mapping[str, str]) -> dict[str, str]:
    """The modules of `algorithms` whose weights have a scale of the whole tensor."""
    return {module: algorithm for module, algorithm in algorithms.items() if FORMATS[algorithm].tensor_scale}


def group_scales(
    spec: DraftSpec, algorithms: Mapping[str, str], module_amax: Callable[[str], float]
) -> dict[str, np.float32]:
    """One scale per group of `scale_groups` and algorithm; `module_amax` gives a module's largest magnitude."""
    scales: dict[str, np.float32] = {}
    for group in scale_groups(spec):
        by_algorithm: dict[str, list[str]] = defaultdict(list)
        for module in group:
            if module in algorithms:
                by_algorithm[algorithms[module]].append(module)
        for algorithm, modules in by_algorithm.items():
            largest = max(map(module_amax, modules))
            scales.update(dict.fromkeys(modules, scale_of(algorithm, largest)))
    return scales


@contextmanager
def naming(tensor: StoredTensor) -> Iterator[None]:
    """Turns the error for a weight that is NaN or infinite into a CheckpointError that names `tensor`."""
    try:
        yield
    except NonFiniteError as error:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r}: {error}") from None


def scale_of(algorithm: str, largest: float) -> np.float32:
    """amax / 448 for FP8, amax / (6 * 448) for NVFP4, as modelopt 0.47 computes them in float32.

    Where all is 0 the largest code stands in (modelopt, tensor_quantizer.py:1087). Subnormal ranges count as the least
    normal one, so that no scale underflows.
    """
    number_format = FORMATS[algorithm]
    top = max(largest, SMALLEST_NORMAL) if largest else number_format.largest
    return np.float32(top) / np.float32(number_format.scale_range)


def input_scales(spec: DraftSpec, algorithms: Mapping[str, str], inputs: Mapping[str, float]) -> dict[str, np.float32]:
    """input_scale by module whose input is quantised: one per group of `scale_groups` and algorithm.

    The graphs read a stacked input at the widest of its scales, so each layer stores that one, for every runtime.
    Raises CheckpointError if `inputs` lacks a module or has an invalid magnitude.
    """
    quantised = {module: algorithm for module, algorithm in algorithms.items() if FORMATS[algorithm].quantises_input}
    return group_scales(spec, quantised, lambda module: _checked(inputs.get(module), module))


def cache_scales(spec: DraftSpec, ranges: Ranges) -> dict[str, np.float32]:
    """k_scale and v_scale of every layer, by tensor name; raises CheckpointError as `input_scales` does."""
    scales: dict[str, np.float32] = {}
    for x, values in (("k", ranges.k), ("v", ranges.v)):
        for attention, value in zip(spec.attention_modules(), values, strict=True):
            name = f"{attention}.{x}_proj.{x}_scale"
            scales[name] = scale_of(FP8, _checked(value, name))
    return scales


def _checked(value: float | None, name: str) -> float:
    if value is None or not 0 <= value < float("inf"):
        found = "none" if value is None else value
        raise CheckpointError(
            f"calibration ranges: {name}: expected the largest magnitude of its input, found {found}",
            hint=f"capture features, then pass them as --calibration: {CAPTURE}",
        )
    return value
