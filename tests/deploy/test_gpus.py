# SPDX-License-Identifier: Apache-2.0
"""Every figure of a GPU has a primary source (NVIDIA's documents, AIConfigurator's files, the driver); NVML's names."""

from __future__ import annotations

import re

import msgspec
import pytest

from dflash_trt.deploy import catalog
from dflash_trt.deploy.gpus import GpuSpec, gpu_named, known_gpu, known_gpus, parse_gpus

MIB = 1 << 20
PRIMARY = re.compile(
    r"nvidia-smi\b|AIConfigurator @ [0-9a-f]{8}, systems/|one GPU$"
    r"|(PCI Express [45]\.0 x16, )?NVIDIA .*(datasheet|whitepaper|product brief)"
)
ENCYCLOPEDIA = re.compile(r"pedia|wiki|techpowerup|blog|\.(com|org|net|jp|ai)/", re.IGNORECASE)


def refusal(gpu: GpuSpec) -> str | None:
    """The first fault of a GPU's sources; None where there is none."""
    if missing := {"memory", "rates", "link"} - gpu.sources.keys():
        return f"no source of {', '.join(sorted(missing))}"
    for text in gpu.sources.values():
        if ENCYCLOPEDIA.search(text):
            return f"not a primary source: {text}"
        if not PRIMARY.match(text):
            return f"unknown source: {text}"
    return None


@pytest.mark.parametrize("gpu", known_gpus().values(), ids=lambda gpu: gpu.name)
def test_every_figure_has_a_primary_source(gpu: GpuSpec) -> None:
    assert refusal(gpu) is None
    stated = re.search(r"([\d,]+) MiB", gpu.sources["memory"])
    if stated:
        assert gpu.memory_bytes == int(stated[1].replace(",", "")) * MIB


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({}, "no source of link, memory, rates"),
        ({"rates": "grokipedia.com/page/NVIDIA_L4_vs_L40S"}, "not a primary source"),
        ({"rates": "NVIDIA A100 datasheet, by glennklockwood.com/garden/processors/A100"}, "not a primary source"),
        ({"link": "https://en.wikipedia.org/wiki/Hopper"}, "not a primary source"),
        ({"memory": "known"}, "unknown source: known"),
    ],
)
def test_others_are_refused(sources: dict[str, str], words: str) -> None:
    gpu = known_gpu("a100")
    changed = msgspec.structs.replace(gpu, sources={**gpu.sources, **sources} if sources else {})
    assert words in str(refusal(changed))


def test_memory_is_the_driver_s() -> None:
    """It is read from nvidia-smi where a GPU has memory of its own."""
    shown = {
        name: gpu.memory_bytes / MIB for name, gpu in known_gpus().items() if "nvidia-smi" in gpu.sources["memory"]
    }
    assert (shown["rtx5090"], shown["h200"], shown["b200"], shown["b300"]) == (32607, 143771, 183359, 275040)
    assert known_gpus().keys() - shown.keys() == {"thor", "gb10"}


@pytest.mark.parametrize(
    ("title", "gigabytes", "name"),
    [
        ("NVIDIA H200", 150, "h200"),
        ("NVIDIA H100 80GB HBM3", 85, "h100"),
        ("NVIDIA H100 NVL", 100, "h100-nvl"),
        ("NVIDIA A100-SXM4-40GB", 42, "a100-40gb"),
        ("NVIDIA GeForce RTX 5090", 34, "rtx5090"),
        ("NVIDIA L4", 24, "l4"),
        ("NVIDIA L40S", 48, "l40s"),
        ("NVIDIA GB200", 198, "gb200"),
        ("NVIDIA GB10", 128, "gb10"),
        ("Tesla V100-SXM2-16GB", 16, None),
    ],
)
def test_names_of_the_driver(title: str, gigabytes: int, name: str | None) -> None:
    found = gpu_named(title, gigabytes * 10**9)
    assert (None if found is None else found.name) == name


def test_hints_choose_by_the_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "own_gpu", lambda: known_gpus()["rtx5090"])
    assert "serve-config qwen3-8b.rtx5090x1.latency --runtime vllm" in str(catalog.next_commands("Qwen/Qwen3-8B"))
    monkeypatch.setattr(catalog, "own_gpu", lambda: None)
    assert "serve-config --list Qwen/Qwen3-8B" in str(catalog.next_commands("Qwen/Qwen3-8B"))


@pytest.mark.parametrize("text", ["b300x8", "B300x8", "8xb300", "8XB300"])
def test_gpus_in_any_order(text: str) -> None:
    assert str(parse_gpus(text, "--gpus")) == "b300x8"
