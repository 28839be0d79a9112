# SPDX-License-Identifier: Apache-2.0
"""Settings of the embedded runtime: the one list from which API, command line and Triton's model file are made."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from dflash_trt.api.fields import Bounds, checked_number, descriptions, metavars, number_fields, refusal
from dflash_trt.api.known_settings import KnownSettings
from dflash_trt.errors import MissingDependencyError

Device = Literal["auto", "cpu", "cuda"]
Executor = Literal["auto", "onnxruntime", "torch", "tensorrt"]
Dtype = Literal["auto", "float32", "bfloat16"]
DTYPES = get_args(Dtype)
DEFAULT_BATCH_SIZE = 16
"""Requests at once for an engine without TensorRT plans."""
MAX_SIZE = 2**31 - 1
"""Slots and positions are INT32 in both graphs."""
MAX_CACHE_GIB = 2**20  # a PiB, which no machine has


class RuntimeOptions(msgspec.Struct, metaclass=KnownSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one runtime; raises RequestError, with the field's name, for an invalid value."""

    max_batch_size: Annotated[
        int | None, Bounds(1, MAX_SIZE, "1 to 2^31 - 1"),
        Meta(description=f"Requests at once. Default: what the engine's TensorRT plans hold, or {DEFAULT_BATCH_SIZE}."),
    ] = None  # fmt: skip
    draft_length: Annotated[
        int | str,
        Meta(
            description="Draft tokens to verify in a step: auto (the fastest, by measured steps and acceptance), a"
            " number, 0 for no speculation, or 1:7,8:3 (by batch size). A request may ask for its own.",
            extra={"metavar": "LENGTH"},
        ),
    ] = "auto"
    cache_gib: Annotated[
        float, Bounds(math.ulp(0), MAX_CACHE_GIB, f"more than 0 and at most {MAX_CACHE_GIB} GiB"),
        Meta(description="Memory for the caches of target and drafter together, in GiB."),
    ] = 4.0  # fmt: skip
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the cached prefixes of earlier prompts, of target and drafter.")
    ] = True
    prefill_chunk: Annotated[
        int, Bounds(1, MAX_SIZE, "1 to 2^31 - 1"),
        Meta(description="Most prompt tokens in a step, so that a long prompt does not stall other requests."),
    ] = 256  # fmt: skip
    device: Annotated[Device, Meta(description="Device that computes; auto: CUDA where torch sees it.")] = "auto"
    executor: Annotated[
        Executor,
        Meta(description="Runs the drafter; auto: TensorRT plans or torch on a GPU, ONNX Runtime on a CPU."),
    ] = "auto"
    dtype: Annotated[
        Dtype,
        Meta(description="Type to compute the target in; auto: bfloat16 for BF16 checkpoints on a GPU, else float32."),
    ] = "auto"
    acceptance_rule: Annotated[
        str,
        Meta(
            description="Which drafts are accepted: exact (lossless), or the name of a plug-in's rule.",
            extra={"metavar": "NAME"},
        ),
    ] = "exact"

    def __post_init__(self) -> None:
        for name, field in NUMBERS.items():
            if (value := getattr(self, name)) is not None or field.default is not None:
                checked_number(name, value, field)
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if not isinstance(self.acceptance_rule, str):
            raise refusal("acceptance_rule", "the name of a rule", self.acceptance_rule)
        if not isinstance(self.enable_prefix_caching, bool):
            raise refusal("enable_prefix_caching", "True or False", self.enable_prefix_caching)


NUMBERS = number_fields(RuntimeOptions)
CHOICES = {name: get_args(kind) for name, kind in get_type_hints(RuntimeOptions).items() if get_origin(kind) is Literal}
DESCRIPTIONS = descriptions(RuntimeOptions)
METAVARS = metavars(RuntimeOptions)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises RequestError, with the setting's name, for anything but one of `choices`."""
    if value not in choices:
        raise refusal(name, f"{', '.join(choices[:-1])} or {choices[-1]}", value)


def check_dtype(dtype: object) -> None:
    """Raises RequestError for anything but one of DTYPES."""
    check_choice("dtype", dtype, DTYPES)


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
