# SPDX-License-Identifier: Apache-2.0
"""Every figure of a GPU has a primary source: NVIDIA's documents, AIConfigurator's files, or the driver."""

from __future__ import annotations

import re

import msgspec
import pytest

from dflash_trt.deploy.gpus import GpuSpec, known_gpu, known_gpus

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
