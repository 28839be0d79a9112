# SPDX-License-Identifier: Apache-2.0
"""Settings of the embedded runtime: each one's default and check, for API, CLI and Triton."""

from __future__ import annotations

import msgspec

from dflash_trt.api.sampling_params import is_integer
from dflash_trt.errors import MissingDependencyError, RequestError, shown

DEVICES = ("auto", "cpu", "cuda")
EXECUTORS = ("auto", "onnxruntime", "torch", "tensorrt")
DTYPES = ("auto", "float32", "bfloat16")
DEFAULT_BATCH_SIZE = 16
"""Requests at once for an engine without TensorRT plans."""
MAX_SIZE = 2**31 - 1
"""Slots and positions are INT32 in both graphs."""
MAX_CACHE_GIB = 2**20  # a PiB, which no machine has


def check_dtype(dtype: object) -> None:
    """Raises RequestError for anything but one of DTYPES."""
    if dtype not in DTYPES:
        raise RequestError(f"dtype: expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, found {shown(dtype)}")


class RuntimeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one runtime; raises RequestError, with the field's name, for an invalid value."""

    max_batch_size: int | None = None
    """Requests that run at once, 1 to 2^31 - 1; None: what the engine's TensorRT plans hold, else
    DEFAULT_BATCH_SIZE."""
    cache_gib: float = 4.0
    """Memory for the caches of target and drafter together, in GiB, more than 0."""
    device: str = "auto"
    """Device: cpu, cuda or auto, which is CUDA where torch sees it."""
    executor: str = "auto"
    """What runs the drafter: onnxruntime (on a CPU), torch, tensorrt (plans), or auto: on a GPU the engine's plans, or
    torch where it has none; on a CPU ONNX Runtime."""
    dtype: str = "auto"
    """Type that the target is computed in: auto and float32 are FP32; bfloat16 needs a BF16 checkpoint."""
    draft_length: int | str = "auto"
    """Draft tokens that a step verifies: a number, 0 (plain decoding) to K, a schedule "1:7,8:3" by batch size, or
    "auto": the fastest by measured steps and acceptance. A request's own draft_length replaces auto's choice, and is at
    most a fixed one."""
    prefill_chunk: int = 256
    """Largest number of prompt tokens in a step, 1 to 2^31 - 1, so that a long prompt does not stall other requests."""
    enable_prefix_caching: bool = True
    """Reuse the cached prefixes of earlier prompts, of target and drafter."""
    num_ranks: int = 1
    """Ranks that share the target, 1 or more, started by torchrun or mpiexec."""

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "prefill_chunk", "num_ranks"):
            value = getattr(self, name)
            if not (is_integer(value) and 1 <= value <= MAX_SIZE) and (name, value) != ("max_batch_size", None):
                expected = f"at most {MAX_SIZE}" if is_integer(value) and value > 0 else "at least 1"
                raise RequestError(f"{name}: expected {expected}, found {shown(value)}")
        is_number = isinstance(self.cache_gib, int | float) and not isinstance(self.cache_gib, bool)
        if not is_number or not 0 < self.cache_gib <= MAX_CACHE_GIB:
            expected = f"more than 0 and at most {MAX_CACHE_GIB} GiB"
            raise RequestError(f"cache_gib: expected {expected}, found {shown(self.cache_gib)}")
        if self.device not in DEVICES:
            raise RequestError(f"device: expected auto, cpu or cuda, found {shown(self.device)}")
        if self.executor not in EXECUTORS:
            expected = f"{', '.join(EXECUTORS[:-1])} or {EXECUTORS[-1]}"
            raise RequestError(f"executor: expected {expected}, found {shown(self.executor)}")
        check_dtype(self.dtype)
        if not isinstance(self.enable_prefix_caching, bool):
            raise RequestError(f"enable_prefix_caching: expected True or False, found {self.enable_prefix_caching!r}")


DEFAULTS = RuntimeOptions()


def choose_device(device: str) -> str:
    """Resolves auto to "cpu" or "cuda"; MissingDependencyError for a CUDA device that torch does not see."""
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise MissingDependencyError(
            f"device: expected a CUDA device, found none that torch {torch.__version__} sees",
            hint="install a CUDA build of torch, or decode with --device cpu",
        )
    return "cuda" if has_cuda and device != "cpu" else "cpu"
