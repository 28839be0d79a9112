# SPDX-License-Identifier: Apache-2.0
"""Constants of the cost model, each with its range, source and date (data/constants.json), and the rates of GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import msgspec

from dflash_trt.deploy.gpus import GpuSpec
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import package_data
from dflash_trt.files.strict_yaml import closest

DATA = Path(__file__).parent / "data"
Unit = Literal["bytes/s", "flop/s", "s", "ratio", "count", "exponent"]
End = Literal["low", "high"]
GPU_RATES = ("memory_bandwidth", "bf16_flops", "fp8_flops", "fp4_flops", "link_bandwidth")
"""Facts of a GPU that the model computes with."""


class Constant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    value: float
    low: float
    high: float
    unit: Unit
    source: str
    date: str
    """When the source was read or published."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of one GPU under one runtime, in SI units; a rate of 0 means that the hardware lacks it."""

    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float
    fp4_flops: float
    link_bandwidth: float
    bandwidth_efficiency: float
    compute_efficiency: float
    fp4_compute_efficiency: float
    gemm_seconds: float
    attention_seconds: float
    attention_compute_efficiency: float
    window_compute_efficiency: float
    """Compute efficiency of prompts in sliding layers, whose kernels compute whole tiles."""
    window_bandwidth_efficiency: float
    small_kernel_seconds: float
    small_kernels_per_layer: float
    """For the target, and EAGLE-3's layer; a DFlash drafter's are counted (shapes.py)."""
    allreduce_seconds: float
    link_efficiency: float
    moe_kernel_seconds: float
    moe_bandwidth_efficiency: float
    moe_factor: float
    expert_imbalance: float
    prompt_factor: float
    """Arithmetic of a prompt's token over that of a verified one."""
    routing_exponent: float
    host_plain_seconds: float
    host_speculative_seconds: float
    host_request_seconds: float
    host_speculative_request_seconds: float
    attention_dp_wait: float
    """Time of a step over that of its ranks, where each keeps the attention of its own requests."""
    host_prompt_seconds: float
    """Admission of one request, paid by the step that ends its prompt."""

    @property
    def read_rate(self) -> float:
        """Bytes a second that kernels reach."""
        return self.memory_bandwidth * self.bandwidth_efficiency

    def compute_rate(self, bits: float) -> float:
        """Flops a second that GEMMs reach on weights of `bits`; formats without tensor cores are widened."""
        if bits < 8 and self.fp4_flops:
            return self.fp4_flops * self.fp4_compute_efficiency
        if bits <= 8 and self.fp8_flops:
            return self.fp8_flops * self.compute_efficiency
        return self.bf16_flops * self.compute_efficiency


class Constants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kernels: dict[str, Constant]
    runtimes: dict[str, dict[str, Constant]]
    eagle3: dict[str, Constant]

    def used(self, runtime: str) -> dict[str, Constant]:
        """Constants under a runtime, by name; raises ConfigError with the list of known ones."""
        if runtime not in self.runtimes:
            raise ConfigError(
                f"estimate: expected a runtime whose constants are known ({', '.join(sorted(self.runtimes))}), found"
                f" {runtime!r}{closest(runtime, self.runtimes, 'runtime')}"
            )
        return {**self.kernels, **self.runtimes[runtime]}

    def __iter__(self) -> Iterator[tuple[str, Constant]]:
        """Every constant with its place in the file."""
        for runtime, entries in self.runtimes.items():
            yield from ((f"runtimes.{runtime}.{name}", constant) for name, constant in entries.items())
        for section, entries in (("kernels", self.kernels), ("eagle3", self.eagle3)):
            yield from ((f"{section}.{name}", constant) for name, constant in entries.items())


@cache
def constants() -> Constants:
    return package_data(DATA / "constants.json", Constants)


def rates(gpu: GpuSpec, runtime: str, ends: Mapping[str, End] | None = None) -> Rates:
    """The rates of `gpu` under `runtime`; constants named in `ends` stand at that end of their range.

    Raises ConfigError for a GPU that was described without bandwidth or arithmetic, and for an unknown runtime.
    """
    if not gpu.memory_bandwidth or not gpu.bf16_flops:
        raise ConfigError(
            f"the memory bandwidth and BF16 rate of {gpu.name} are unknown",
            hint="add bandwidth (GB/s) and bf16 (dense TFLOPS) to gpu_facts",
        )
    used, chosen = constants().used(runtime), ends or {}
    facts = {name: getattr(gpu, name) for name in GPU_RATES}
    return Rates(**facts, **{name: getattr(constant, chosen.get(name, "value")) for name, constant in used.items()})


class Band(msgspec.Struct, frozen=True):
    """A prediction and its range."""

    value: float
    low: float
    high: float


class Influence(msgspec.Struct, frozen=True):
    """How a prediction changes when one constant goes through its range."""

    constant: str
    at_low: float
    """The prediction with the constant at the low end of its range, over the prediction."""
    at_high: float

    @property
    def spread(self) -> float:
        """The larger of the two changes, as a share."""
        return max(abs(self.at_low - 1), abs(self.at_high - 1))


def vary(gpu: GpuSpec, runtime: str, predict: Callable[[Rates], Sequence[float]]) -> tuple[list[Band], list[Influence]]:
    """Bands of the results of `predict`, and the influences on the first one, strongest first.

    Varies one constant at a time and combines the log-changes as a root sum of squares, as for independent causes.
    """
    nominal = list(predict(rates(gpu, runtime)))
    ups, downs = [0.0] * len(nominal), [0.0] * len(nominal)
    influences = []
    for name, constant in constants().used(runtime).items():
        if constant.low == constant.high:
            continue
        moved = [predict(rates(gpu, runtime, {name: end})) for end in get_args(End)]
        for index, value in enumerate(nominal):
            changes = [math.log(values[index] / value) for values in moved]
            ups[index] += max(0.0, *changes) ** 2
            downs[index] += min(0.0, *changes) ** 2
        influences.append(Influence(name, moved[0][0] / nominal[0], moved[1][0] / nominal[0]))
    bands = [
        Band(value, value * math.exp(-math.sqrt(down)), value * math.exp(math.sqrt(up)))
        for value, up, down in zip(nominal, ups, downs, strict=True)
    ]
    return bands, sorted(influences, key=lambda influence: -influence.spread)
