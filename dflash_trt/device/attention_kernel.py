# SPDX-License-Identifier: Apache-2.0
"""Whether the attention kernel of this build runs on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_trt import _C
from dflash_trt.errors import MissingDependencyError


def check_kernels(device: torch.device) -> None:
    """Raises MissingDependencyError where `_C` has no attention kernel for this GPU."""
    compiled, found = _C.cuda_architectures(), torch.cuda.get_device_capability(device)
    if not runs_on(compiled, *found):
        raise MissingDependencyError(
            f"attention kernel: expected one for compute capability {found[0]}.{found[1]},"
            f" found {', '.join(compiled) or 'a build without CUDA'}",
            hint="pip install -e . -C cmake.define.DFLASH_CUDA=ON, or decode with --device cpu",
        )


def runs_on(compiled: Sequence[str], major: int, minor: int) -> bool:
    """Whether a GPU runs kernels of these architectures.

    Code for 90a runs on that GPU only; for 80, or for a family such as 100f, also on later GPUs of the same major
    version. PTX such as 90-virtual, which the driver compiles, runs on that GPU and all later ones.
    """
    families = {f"{major}{older}{suffix}" for older in range(minor + 1) for suffix in ("", "f")}
    ptx = [int(name.removesuffix("-virtual")) for name in compiled if name.endswith("-virtual")]
    return (
        f"{major}{minor}a" in compiled
        or not families.isdisjoint(compiled)
        or min(ptx, default=1 << 30) <= 10 * major + minor
    )
