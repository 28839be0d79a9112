# SPDX-License-Identifier: Apache-2.0
"""GPUs that plans are built for: their names, which TensorRT serves them, and the number formats that they read."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dflash_trt.checkpoint.quantization import W4A16_NVFP4
from dflash_trt.errors import BuildError

# https://developer.nvidia.com/cuda-gpus. TensorRT-RTX also builds for 7.5, which has no BF16.
NAMES = {
    "8.0": ("a100", "a30"),
    "8.6": ("rtx3060", "rtx3070", "rtx3080", "rtx3090", "rtxa6000", "a10", "a40"),
    "8.9": ("rtx4060", "rtx4070", "rtx4080", "rtx4090", "rtx6000ada", "l4", "l40", "l40s"),
    "12.0": ("rtx5060", "rtx5070", "rtx5080", "rtx5090", "rtxpro6000"),
    "12.1": ("gb10",),
}
"""Compute capabilities that TensorRT-RTX serves, and names of GPUs that have them."""
# The first GPUs whose tensor cores read a number format (TensorRT support matrix).
LOWEST_SM = {"FP8": (8, 9), "FP4": (10, 0)}


def parse_gpus(text: str) -> tuple[str, ...]:
    """'sm89,rtx5090' -> ('8.9', '12.0'), by rising compute capability; ValueError names what is none."""
    return tuple(sorted({_parse(name) for name in text.split(",")}, key=sm_of))


def _parse(name: str) -> str:
    word = "".join(character for character in name.lower() if character.isalnum())
    for capability, names in NAMES.items():
        if word in (sm_name(capability), *names):
            return capability
    known = ", ".join(f"{sm_name(capability)} ({', '.join(names)})" for capability, names in NAMES.items())
    raise ValueError(
        f"expected {known}, found {name!r}; plans for other GPUs are TensorRT's own, built there by --backend tensorrt"
    )


def sm_name(capability: str) -> str:
    """'8.9' -> 'sm89'."""
    return "sm" + capability.replace(".", "")


def sm_of(capability: str) -> tuple[int, int]:
    """'8.9' -> (8, 9)."""
    major, minor = capability.split(".")
    return int(major), int(minor)


def check_served(capabilities: Iterable[str]) -> None:
    """Raises BuildError for a GPU that TensorRT-RTX does not serve."""
    for capability in capabilities:
        if capability not in NAMES:
            raise BuildError(
                f"TensorRT-RTX: expected a GPU of SM {', '.join(NAMES)}, found SM {capability}",
                hint="build with TensorRT on that GPU: --backend tensorrt",
            )


def check_precision(algorithms: Collection[str], capabilities: Iterable[tuple[int, int]] = ()) -> None:
    """Raises BuildError for weights or a cache that no kernel of plans, or of one of these GPUs, reads."""
    if W4A16_NVFP4 in algorithms:
        raise BuildError(
            f"{W4A16_NVFP4}: expected weights that TensorRT multiplies as they are, found those that it writes out as"
            " BF16 in every pass, slower than recipe bf16",
            hint="build --recipe int4-w4a16, fp8 or nvfp4; this checkpoint is for native mode, where the server reads"
            " it: dflash-trt serve-config",
        )
    for capability in sorted(capabilities):
        for kind, lowest in LOWEST_SM.items():
            needing = sorted(algorithm for algorithm in algorithms if kind in algorithm)
            if needing and capability < lowest:
                needed, found = (".".join(map(str, version)) for version in (lowest, capability))
                fitting = "fp8, " if kind == "FP4" and capability >= LOWEST_SM["FP8"] else ""
                raise BuildError(
                    f"{needing[0]}: expected a GPU of SM {needed} or newer, found SM {found}",
                    hint=f"build --recipe {fitting}int4-w4a16 or bf16",
                )
