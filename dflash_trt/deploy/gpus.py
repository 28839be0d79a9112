# SPDX-License-Identifier: Apache-2.0
"""The GPUs that deployments name, and what is known of them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.json_file import package_data
from dflash_trt.files.strict_yaml import closest

DATA = Path(__file__).parent / "data"
MAX_NODES = 8
GIGA, TERA = 10**9, 10**12
NAME = r"[a-z0-9][a-z0-9-]*"
COUNTED = re.compile(
    rf"(?P<name>{NAME})x(?P<number>[1-9]\d{{0,5}})|(?P<first>[1-9]\d{{0,5}})x(?P<last>{NAME})", re.ASCII
)
FACTS_EXAMPLE = "memory=16,bandwidth=896,sm=12.0"


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU model. Rates are the data sheet's, dense, with FP32 accumulation; 0: the hardware lacks it."""

    name: str
    title: str
    memory_bytes: int
    """The driver's figure; the advertised size of memory shared with the CPU, and of a described GPU."""
    compute_capability: tuple[int, int]
    memory_bandwidth: float
    """Bytes a second."""
    bf16_flops: float
    fp8_flops: float
    fp4_flops: float
    link_bandwidth: float
    """Bytes a second from one GPU to the others of its node, in one direction: NVLink, else PCIe."""
    gpus_per_node: int = 8
    sources: dict[str, str] = {}
    """NVIDIA's documents and tools: of the memory, of all rates and of the link."""

    @property
    def sm(self) -> str:
        """SM 10.3."""
        return "SM {}.{}".format(*self.compute_capability)


class Gpus(msgspec.Struct, frozen=True):
    """Some GPUs of one model, in one node or in whole nodes."""

    gpu: GpuSpec
    count: int

    @property
    def name(self) -> str:
        """Name that deployments use."""
        return self.gpu.name

    def __str__(self) -> str:
        return f"{self.name}x{self.count}"

    @property
    def per_node(self) -> int:
        """GPUs in each node."""
        return min(self.count, self.gpu.gpus_per_node)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.count // self.per_node


@cache
def known_gpus() -> dict[str, GpuSpec]:
    """By the name that deployments use."""
    rows = package_data(DATA / "gpus.json", list[GpuSpec])
    return {gpu.name: gpu for gpu in rows}


def known_gpu(name: str, where: str = "gpu") -> GpuSpec:
    """Facts of a GPU by its name; raises ConfigError, naming `where`, for one that is not known."""
    if (gpu := known_gpus().get(name)) is not None:
        return gpu
    names = sorted(known_gpus())
    raise ConfigError(
        f"{where}: expected a GPU ({', '.join(names)}), found {shown(name)}{closest(name, names, 'GPU')}",
        hint=f"describe another one: --gpu-facts {FACTS_EXAMPLE}",
    )


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU that the package does not know, as its owner describes it: data-sheet figures, rates dense."""

    memory: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    """Gigabytes."""
    sm: Annotated[float, msgspec.Meta(ge=7.5, lt=100)]
    """Compute capability, such as 12.0."""
    bandwidth: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    """Gigabytes a second; `estimate` needs it, configurations do not."""
    bf16: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    """Teraflops, as are the next two; `estimate` needs it."""
    fp8: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    fp4: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    link: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    """Gigabytes a second from one GPU to the others, in one direction; `estimate` needs it for several."""

    def spec(self, name: str) -> GpuSpec:
        """The GPU under the name that the deployment gives it."""
        return GpuSpec(
            name=name, title=name, memory_bytes=round(self.memory * GIGA), compute_capability=_version(self.sm),
            memory_bandwidth=self.bandwidth * GIGA, bf16_flops=self.bf16 * TERA, fp8_flops=self.fp8 * TERA,
            fp4_flops=self.fp4 * TERA, link_bandwidth=self.link * GIGA,
        )  # fmt: skip


def parse_gpu_facts(text: str, where: str) -> GpuFacts:
    """`memory=16,bandwidth=896,sm=12.0` as facts; raises ConfigError, naming `where`."""
    pairs = [part.partition("=") for part in text.split(",")]
    names = GpuFacts.__struct_fields__
    try:
        for key, _, _ in pairs:
            if key not in names:
                near = closest(key, names, "fact")
                raise ConfigError(f"{where}: expected {', '.join(names)}, found {shown(key)}{near}")
        return msgspec.convert({key: value for key, _, value in pairs}, GpuFacts, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: expected {FACTS_EXAMPLE}, found {shown(text)}: {error}") from None


def parse_gpus(text: str, where: str, facts: GpuFacts | None = None) -> Gpus:
    """`b300x8`, in any case and order, as GPUs, with `facts` any name.

    Raises ConfigError, naming `where`, for unknown GPUs and counts.
    """
    match = COUNTED.fullmatch(text.lower())
    if match is None:
        raise ConfigError(f"{where}: expected a GPU and a count, like b300x8, found {shown(text)}", hint=_counted(text))
    name, number = match["name"] or match["last"], match["number"] or match["first"]
    gpu, count = facts.spec(name) if facts else known_gpu(name, where), int(number)
    most, nodes = gpu.gpus_per_node, gpu.gpus_per_node * MAX_NODES
    if count not in counts(gpu):
        raise ConfigError(
            f"{where}: expected at most {most} GPUs (one node), or whole nodes up to {nodes}, found {shown(text)}"
        )
    return Gpus(gpu, count)


def counts(gpu: GpuSpec) -> list[int]:
    """Numbers of one GPU that a deployment may have, ascending: up to a node, then whole nodes."""
    node = gpu.gpus_per_node
    return [*range(1, node + 1), *(node * nodes for nodes in range(2, MAX_NODES + 1))]


def _counted(text: str) -> str:
    return f"{text.lower()}x1 is one of them" if text.lower() in known_gpus() else "8xb300 and B300x8 are the same"


def _version(sm: float) -> tuple[int, int]:
    major, _, minor = f"{sm:.1f}".partition(".")
    return int(major), int(minor)


def own_gpu() -> GpuSpec | None:
    """The first GPU of this machine; None without a driver, and for a GPU that is not known."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        return gpu_named(str(nvml.nvmlDeviceGetName(device)), int(nvml.nvmlDeviceGetMemoryInfo(device).total))
    except nvml.NVMLError:  # no GPU, or memory shared with the CPU
        return None
    finally:
        nvml.nvmlShutdown()


def gpu_named(title: str, memory_bytes: int) -> GpuSpec | None:
    """The known GPU of NVML's name, `NVIDIA H100 80GB HBM3`; of several variants the one nearest in memory."""
    words = "".join(filter(str.isalnum, title.lower()))
    found = [gpu for gpu in known_gpus().values() if _model(gpu) in words]
    longest = max(map(len, map(_model, found)), default=0)  # GB200 contains B200
    variants = [gpu for gpu in found if len(_model(gpu)) == longest]
    return min(variants, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=None)


def _model(gpu: GpuSpec) -> str:
    return gpu.name.partition("-")[0]
