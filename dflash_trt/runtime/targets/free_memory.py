# SPDX-License-Identifier: Apache-2.0
"""Checks that a target's weights fit this machine, before minutes of fetching and loading."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.checkpoint.safetensors_file import Tensor
from dflash_trt.errors import CheckpointError, EngineError
from dflash_trt.files.read import read_text

if TYPE_CHECKING:
    import torch

PACKED_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
"""Tensors of gpt-oss's MXFP4 experts: two 4-bit codes a byte, which transformers unpacks, and their scales."""
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
EXPERTS, SECOND_MATRICES = ".experts.", ("down_proj", ".w2.")
CGROUP = Path("/sys/fs/cgroup")


def check_memory(directory: Path, weights: Mapping[str, Tensor], dtype: torch.dtype, num_ranks: int = 1) -> None:
    """Raises CheckpointError where a rank's share of the weights, as `dtype`, is more than the memory that is free."""
    needed = loaded_bytes(weights, dtype) // num_ranks
    if (free := free_bytes()) is not None and needed > free:
        bits = 8 * dtype.itemsize
        half = "--dtype bfloat16 halves them; " if bits == 32 else ""
        raise CheckpointError(
            f"{directory}: expected {needed / 1e9:.1f} GB of free memory for its weights, which are computed with as"
            f" {bits}-bit numbers, found {free / 1e9:.1f} GB",
            hint=f"{half}take a machine with more memory or share it with --tp; on GPUs, TensorRT-LLM, vLLM and SGLang"
            " serve it from a deployment: dflash-trt serve-config --list",
        )


def loaded_bytes(weights: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Peak bytes of the target while each weight is converted to `dtype` and laid out."""
    sizes = {name: math.prod(tensor.shape) for name, tensor in weights.items()}
    packed = {name for name, tensor in weights.items() if name.endswith(PACKED_SUFFIX) and tensor.dtype == "U8"}
    scales = {name.removesuffix(PACKED_SUFFIX) + SCALES_SUFFIX for name in packed}
    counts = {name: 0 if name in scales else size * (2 if name in packed else 1) for name, size in sizes.items()}
    copies = _experts_copy(counts) + (_head_copy(sizes) if dtype.itemsize == 4 else 0)
    return dtype.itemsize * (sum(counts.values()) + copies)


def _head_copy(sizes: Mapping[str, int]) -> int:
    """Values of the embeddings where they are the head, too: `panel_linear` lays them out beside themselves."""
    if any(name.endswith(HEAD) for name in sizes):
        return 0
    return max((size for name, size in sizes.items() if name.endswith(EMBEDDINGS)), default=0)


def _experts_copy(counts: Mapping[str, int]) -> int:
    """Values of the first matrices of a layer's experts: `grouped_experts` lays them out before it lets them go."""
    layers: Counter[str] = Counter()
    for name, count in counts.items():
        if EXPERTS in name and not any(second in name for second in SECOND_MATRICES):
            layers[name.partition(EXPERTS)[0]] += count
    return max(layers.values(), default=0)


def free_bytes() -> int | None:
    """Free bytes of this machine, or of the container if less; None where the system does not say."""
    machine = _meminfo("MemAvailable")
    limits = [room for room in (machine, _cgroup_room()) if room is not None]
    return min(limits, default=None)


def _meminfo(key: str) -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None


def _cgroup_room() -> int | None:
    """Bytes below the limit of this process's cgroup (v2); the page cache is evicted on demand and does not count."""
    folder = _own_cgroup()
    limit = next(iter(_lines(folder / "memory.max")), "max")
    if not limit.isdigit():
        return None
    used = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    return max(0, int(limit) - int(used.get("anon", "0")))


def _own_cgroup() -> Path:
    own = next((line.split("::", 1)[1] for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::")), "/")
    return CGROUP / own.lstrip("/")


def _lines(file: Path) -> list[str]:
    """Lines of a kernel file; none where it is missing."""
    try:
        return read_text(file, EngineError, limit=2**20).splitlines()
    except EngineError:
        return []
