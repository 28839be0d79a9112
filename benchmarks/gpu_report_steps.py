# SPDX-License-Identifier: Apache-2.0
"""The steps of gpu_report.py, in the order in which they tell most, and those that bring what a machine lacks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from dflash_trt.cli.doctor_machine import package_version
from dflash_trt.engine.plans.machine import check_precision, check_served, sm_name, sm_of
from dflash_trt.engine.plans.tensorrt_api import RUNTIMES
from dflash_trt.errors import BuildError
from dflash_trt.quantize.recipe import FP8_KV, load_recipe

PLUGIN, TENSORRT, TRTLLM, TORCH = "plugin library", "tensorrt", "tensorrt_llm", "torch with CUDA"
RTX, RTX_LIBRARIES = RUNTIMES["tensorrt_rtx"].package, "tensorrt_rtx_cu13_libs"
KERNELS, NETWORK, SANITIZER, HOPPER = "kernels, compiled", "network", "compute-sanitizer", "a GPU of SM 9.0"
"""Requirements of steps, by doctor's names or by the steps that provide them."""
RUNNING, BUILDING = (TORCH, KERNELS), (TORCH, TENSORRT, PLUGIN)
# By CUDA version of torch; that of 13 was run on a CPU, those of 12 bring no nvcc in some releases.
NVCC_WHEELS = {
    13: ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl"),
    12: ("cuda-nvcc", "cuda-runtime", "cuda-cccl"),
}
NVCC_SUFFIXES = {13: "==13.0.*", 12: "-cu12==12.9.*"}
GPU_OF_TORCH = """import torch
gpu = torch.cuda.get_device_properties(0)
card = f"{gpu.name}, SM {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
print(f"{card}; torch {torch.__version__}, CUDA {torch.version.cuda}")"""
REHEARSED_SECONDS = 5
"""Seconds of a rehearsal, on a CPU that may be busy, for one of a run."""
FIRST_KERNELS = 8.0
"""The compute capability that the kernels begin with."""


@dataclass(frozen=True)
class Step:
    """One thing to run; words in braces are filled in by `steps` and `words`."""

    title: str
    command: str
    seconds: float
    """It may take."""
    needs: tuple[str, ...] = ()
    """Requirements of the machine."""
    after: tuple[str, ...] = ()
    """The steps without whose success this one has nothing to work on."""
    shown: int = 40
    """Lines of its output on the page, the last ones."""
    lacks: str | None = None
    """Requirements that this machine cannot meet with any package."""
    environment: Mapping[str, str] = field(default_factory=dict)


EACH = {
    "pair": ("tiny-gpt-oss", "tiny-qwen3"),
    "recipe": ("bf16", "fp8", "nvfp4"),
    "plan": ("bf16", "fp8", f"fp8{FP8_KV}", "int4-w4a16", "nvfp4", "nvfp4-native", "mixed-nvfp4-fp8"),
    "start": ("first", "second"),
}
"""A step whose title names one of these is a step for each."""
SIZES: dict[str, dict[str, str]] = {
    "cuda": {"decoding": "--tokens 64 --num-prompts 2", "captured": "--max-tokens 96", "training": "--steps 40"},
    "cpu": {
        "decoding": "--tokens 6 --num-prompts 1 --batch 1 --batch 2 --rounds 1",
        "decode": "--num-prompts 2 --tokens 24",
        "captured": "--max-tokens 40 --max-prompts 4", "training": "--steps 4", "collect": "--collect-only -q",
        "passes": "--shape tiny --layers 1 --batch-sizes 1,2 --contexts 64,9000", "attention": "--dry-run",
        "phases": "--help",
    },
}  # fmt: skip
"""Options of commands on a GPU, and in a rehearsal."""
SHAPES: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {"dense": ("qwen3-8b",), "experts": ("gpt-oss-20b",), "small": ("qwen3-0.6b",)},
    "cpu": {"dense": ("tiny",), "experts": ("tiny-gpt-oss",), "small": ()},
}
TEST = "{python} -m pytest -m gpu -rs --tb=short --maxfail=6 {collect} tests/gpu"
DECODING, BENCH = "/test_decode.py -vv", "{python} benchmarks/bench_gpu.py --rounds 3 --device {device} --shape"
OTHERS = f"{TEST} --ignore tests/gpu/test_decode.py --ignore tests/gpu/test_sanitizer.py"
ATTENTION = "{python} benchmarks/bench_kv_injection_attention.py --runs 20 {attention} --max-rows"
PEERS = "--peer cudnn --peer 'torch flash' --peer fa2 --peer XQA"
ENGINE, PLANS, WHOLE = "{work}/{pair}", "{pair}: plans", "gpt-oss-120b's drafter, whole: plans, fused layers, latency"
RTX_PLANS, RTX_ENGINE = "tiny-gpt-oss: plans by TensorRT-RTX", "{work}/rtx"
PAIR, FEATURES = "{fixtures}/tiny-gpt-oss", "--features {work}/features.safetensors --device {device}"
SMALL = "--max-batch-size 2 --max-seq-len 512 --max-num-tokens 64"
WHOLE_SIZES = "--layers 8 --max-batch-size 4 --max-seq-len 110000"
"""Rows of each of five slots: 8 layers, 8 heads and 64 numbers of each make them 1.05 x 2^31 elements."""
STEPS = (
    Step("{pair}, tested: texts, steps, graphs, prefixes", f"{TEST}{DECODING} -k {{pair}}", 150, RUNNING, shown=12),
    Step("kernels that are taken, tested", f"{OTHERS} -k 'not (short or ahead)'", 120, RUNNING, shown=8),
    Step("{dense}'s shape: a pass, tokens/s, capture", f"{BENCH} {{dense}} {{decoding}}", 200, RUNNING, shown=60),
    Step("gpt-oss-120b's drafter, {recipe}: a pass",
         "{ours} torch-pass {recipe} {work}/torch-{recipe} --device {device} {passes}", 120, RUNNING),
    Step("attention kernel, measured", f"{ATTENTION} 600000 --only gpt-oss --kernel mma {PEERS} {{libraries}}", 120,
         RUNNING, shown=120),
    Step("attention kernel, clock cycles by phase", "{python} tools/kernel_phases.py {phases}", 90, (*RUNNING, HOPPER)),
    Step("kernels beside them, tested", f"{OTHERS} -k 'short or ahead'", 90, RUNNING, shown=8),
    Step("attention kernel for short contexts, measured", f"{ATTENTION} 270000 --kernel short --peer none", 120,
         RUNNING, shown=150),
    Step("attention kernel with products ahead, measured", f"{ATTENTION} 600000 --only FP8 --kernel ahead --peer none",
         120, (*RUNNING, HOPPER), shown=90),
    Step("{experts}'s shape: a pass, tokens/s, capture", f"{BENCH} {{experts}} {{decoding}}", 200, RUNNING, shown=60),
    Step("a decode, sanitized", f"{TEST}/test_sanitizer.py -v -k decode", 120, (*RUNNING, SANITIZER), shown=4),
    Step("{small}'s shape: a pass, tokens/s, capture", f"{BENCH} {{small}} {{decoding}} --no-peers", 100, RUNNING),
    Step("{pair}: engine", f"{{cli}} build {{fixtures}}/{{pair}}-dflash --target {{fixtures}}/{{pair}} -o {ENGINE}", 60,
         shown=0),
    Step("capture", f"{{cli}} capture {PAIR}-dflash --target {PAIR} --prompts {{fixtures}}/prompts.jsonl"
         " --max-batch-size 32 -o {work}/features.safetensors --device {device} {captured}", 60, RUNNING, shown=4),
    Step("verify of what was captured", f"{{cli}} verify {{work}}/tiny-gpt-oss {FEATURES}", 60, RUNNING,
         ("tiny-gpt-oss: engine", "capture"), shown=30),
    Step("{pair}: tokens/s", f"{{ours}} decode {ENGINE} {{fixtures}}/{{pair}} --executor torch --device {{device}}"
         " {decode}", 90, RUNNING, ("{pair}: engine",)),
    Step("{pair}: parity", f"{{ours}} parity {ENGINE} --executor torch --device {{device}}", 60, RUNNING,
         ("{pair}: engine",)),
    Step("attention kernel for Qwen3-8B, measured", f"{ATTENTION} 600000 --only Qwen3-8B --kernel mma {PEERS}"
         " {libraries}", 120, RUNNING, shown=120),
    Step("recovery for NVFP4", f"{{cli}} recover {PAIR}-dflash --recipe nvfp4 --learning-rate 5e-4 {FEATURES}"
         " -o {work}/recovered {training}", 90, RUNNING, ("capture",), shown=12),
    Step("drafts of every kind, tested against a CPU", f"{TEST}{DECODING} -k computes", 150, RUNNING, shown=12),
    Step("kernels, sanitized", f"{TEST}/test_sanitizer.py -v -k 'not decode'", 240, (*RUNNING, SANITIZER), shown=4),
    Step(PLANS, f"{{cli}} build --plans-for {ENGINE} {SMALL}", 90, BUILDING, ("{pair}: engine",)),
    Step("{pair}: parity of plans", f"{{ours}} parity {ENGINE}", 60, (TORCH, TENSORRT), (PLANS,)),
    Step("{pair}: CUDA graphs of plans", f"{{ours}} graphs {ENGINE}", 60, (TORCH, TENSORRT), (PLANS,)),
    Step("{pair}: tokens/s of plans", f"{{ours}} decode {ENGINE} {{fixtures}}/{{pair}}", 90, (TORCH, TENSORRT),
         (PLANS,)),
    Step(RTX_PLANS, f"{{cli}} build {PAIR}-dflash --target {PAIR} -o {RTX_ENGINE} --gpu {{gpu}} {SMALL}", 90,
         (TORCH, RTX, PLUGIN)),
    Step("{start} start with TensorRT-RTX", f"{{ours}} start {RTX_ENGINE}", 120, (TORCH, RTX), (RTX_PLANS,)),
    Step("parity with TensorRT-RTX", f"{{ours}} parity {RTX_ENGINE}", 60, (TORCH, RTX), (RTX_PLANS,)),
    Step("CUDA graphs with TensorRT-RTX", f"{{ours}} graphs {RTX_ENGINE}", 60, (TORCH, RTX), (RTX_PLANS,)),
    Step("tokens/s with TensorRT-RTX", f"{{ours}} decode {RTX_ENGINE} {PAIR}", 90, (TORCH, RTX), (RTX_PLANS,)),
    Step("gpt-oss-120b's drafter, two layers, {plan}: plans, fused layers, latency",
         "{ours} drafter {plan} {work}/two/{plan}", 120, BUILDING),
    Step(WHOLE, f"{{ours}} drafter bf16 {{work}}/whole/engine {WHOLE_SIZES}", 240, BUILDING),
    Step("a context cache beyond 2^31 elements", "{ours} far-cache {work}/whole/engine", 60, BUILDING, (WHOLE,)),
    Step("TensorRT-LLM's contract", "{python} -m tests.contract.tensorrt_llm_arguments {packages}", 60, (TRTLLM,)),
)  # fmt: skip


def steps(capability: str | None, device: str) -> list[Step]:
    """All steps on a GPU of that compute capability, or of a rehearsal on a `device` cpu, which needs none."""
    made, each = [], EACH | SHAPES[device]
    for step in STEPS:
        names = [name for name in each if f"{{{name}}}" in step.title]
        for values in product(*(each[name] for name in names)):
            chosen = dict(zip(names, values, strict=True))

            def filled(text: str, chosen: Mapping[str, str] = chosen) -> str:
                return re.sub(r"\{(\w+)\}", lambda found: chosen.get(found[1], found[0]), text)

            made.append(replace(
                step, title=filled(step.title), command=filled(step.command), after=tuple(map(filled, step.after)),
                seconds=step.seconds * (REHEARSED_SECONDS if device == "cpu" else 1),
                needs=() if device == "cpu" and step.needs[:2] == RUNNING else step.needs,
                lacks=_lacking(step.needs, chosen.get("recipe") or chosen.get("plan"), capability),
            ))  # fmt: skip
    return made


def words(work: Path, capability: str | None, device: str) -> dict[str, str]:
    """Values of the braces in commands."""
    python, none = shlex.quote(sys.executable), dict.fromkeys(SIZES["cpu"], "")
    return none | SIZES[device] | {
        "python": python, "cli": f"{python} -m dflash_trt", "ours": f"{python} benchmarks/gpu_steps.py",
        "work": shlex.quote(str(work)), "device": device,
        "gpu_of_torch": shlex.quote(GPU_OF_TORCH), "fixtures": "tests/fixtures",
        "gpu": sm_name(capability or "12.0"), "packages": shlex.quote(sysconfig.get_path("purelib")),
    }  # fmt: skip


def _lacking(needs: tuple[str, ...], recipe: str | None, capability: str | None) -> str | None:
    """Features that the GPU lacks for a recipe's weights, or for steps of some GPUs only."""
    if capability is None:
        return None
    try:
        if RTX in needs:
            check_served([capability])
        if HOPPER in needs and capability != "9.0":
            return f"{HOPPER}; this one is of SM {capability}"
        if recipe is not None:
            file = load_recipe(recipe)
            algorithms = {rule.algorithm for rule in file.rules} | ({"FP8"} if file.fp8_kv_cache else set())
            check_precision(algorithms - {"none"}, [sm_of(capability)])
    except BuildError as refused:
        return refused.message
    return None


def setup_steps(cuda: int, capability: str | None, *, online: bool) -> Iterator[Step]:
    """Requirements that a machine with torch for a CUDA version lacks; each is installed after the one before it."""
    install, oldest = "{python} -m pip install ", {name: ".".join(map(str, r.oldest)) for name, r in RUNTIMES.items()}
    if package_version(TENSORRT) is None:
        yield Step("TensorRT, installed", f"{install}tensorrt-cu{cuda}>={oldest['tensorrt']}", 240, (TORCH, NETWORK))
    if package_version(RTX) is None and capability and not _lacking((RTX,), None, capability):
        wheels = " ".join(f"{name}>={oldest['tensorrt_rtx']}" for name in (RTX, RTX_LIBRARIES))
        yield Step("TensorRT-RTX, installed", install + wheels, 240, (TORCH, NETWORK))
    if find_nvcc() is None:
        # All of one release: nvcc's dependencies are unbounded, and a newer compiler than nvcc would write newer PTX.
        wheels = " ".join(f"nvidia-{name}{NVCC_SUFFIXES[cuda]}" for name in NVCC_WHEELS[cuda])
        yield Step("nvcc, installed", install + wheels, 120, (TORCH, NETWORK))
    yield compile_kernels(capability or "9.0", online=online)


def compile_kernels(capability: str, *, online: bool) -> Step:
    """For the GPU at hand only: a family such as 100f needs CUDA 12.9, which older GPUs do not. Includes the kernels
    that no GPU has run.

    Without network by cmake, with the nanobind that is there, where pip would fetch its own; not again where a build
    is newer than its sources.
    """
    lacks, nvcc, environment = None, find_nvcc(), {}
    if float(capability) < FIRST_KERNELS:
        lacks = f"a GPU of SM {FIRST_KERNELS} or newer for the kernels; this one is of SM {capability}"
    if nvcc is not None:  # a wheel has its libraries in lib, where nvcc looks in lib64
        places = (str(Path(nvcc).parents[1] / "lib"), os.environ.get("LIBRARY_PATH"))
        environment = {"CUDACXX": nvcc, "LIBRARY_PATH": ":".join(filter(None, places))}
    architecture = capability.replace(".", "") + ("a" if float(capability) >= 9 else "")
    defines = ("DFLASH_CUDA=ON", f"DFLASH_CUDA_ARCHITECTURES={architecture}", "DFLASH_EXPERIMENTAL_KERNELS=ON")
    command = "{python} -m pip install --no-deps --editable . " + " ".join(f"-C cmake.define.{x}" for x in defines)
    if not online:
        command = "{python} benchmarks/compile_kernels.py --if-stale " + " ".join(defines)
    return Step(KERNELS, command, 240, (TORCH,), shown=1, lacks=lacks, environment=environment)


def find_nvcc() -> str | None:
    """On PATH, in the toolkit's usual place, or of a wheel."""
    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"), *sorted(wheels.glob("*/bin"), reverse=True)]
    return shutil.which("nvcc") or next((str(place / "nvcc") for place in places if (place / "nvcc").is_file()), None)
