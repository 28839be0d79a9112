# SPDX-License-Identifier: Apache-2.0
"""The GPUs that deployments name, and what is known of them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError, cut, shown
from dflash_trt.files.json_file import read_json
from dflash_trt.files.strict_yaml import closest

DATA = Path(__file__).parent / "data"
NODE_GPUS = 8
MAX_GPUS = 64
COUNTS = {str(count): count for count in [*range(1, NODE_GPUS), *range(NODE_GPUS, MAX_GPUS + 1, NODE_GPUS)]}


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU model."""

    title: str
    memory_bytes: int
    """Advertised size in decimal gigabytes, a few percent below what the driver reports."""
    compute_capability: tuple[int, int]
    source: str

    @property
    def sm(self) -> str:
        """SM 10.3."""
        return "SM {}.{}".format(*self.compute_capability)


class Gpus(msgspec.Struct, frozen=True):
    """Some GPUs of one model, in one node or in whole nodes of NODE_GPUS."""

    name: str
    gpu: GpuSpec
    count: int

    def __str__(self) -> str:
        return f"{self.name}x{self.count}"

    @property
    def per_node(self) -> int:
        """GPUs in each node."""
        return min(self.count, NODE_GPUS)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.count // self.per_node


@cache
def known_gpus() -> dict[str, GpuSpec]:
    """By the name that deployments use."""
    return read_json(DATA / "gpus.json", dict[str, GpuSpec], ConfigError, what="the package's data")


def parse_gpus(text: str, where: str) -> Gpus:
    """`b300x8` as GPUs; raises ConfigError, naming `where`, for a GPU or a count that is not known."""
    names = sorted(known_gpus())
    match = re.fullmatch(r"([a-z0-9]+)x([1-9][0-9]*)", text)
    if match is None or match[1] not in names:
        word = text.rpartition("x")[0] or text
        raise ConfigError(
            f"{where}: expected a GPU ({', '.join(names)}) and a count, like b300x8,"
            f" found {shown(text)}{closest(word, names, 'GPU')}"
        )
    if (count := COUNTS.get(match[2])) is None:
        raise ConfigError(
            f"{where}: expected at most {NODE_GPUS} GPUs (one node), or {NODE_GPUS} on each of at most"
            f" {MAX_GPUS // NODE_GPUS} nodes, found {cut(match[2])}"
        )
    return Gpus(match[1], known_gpus()[match[1]], count)
