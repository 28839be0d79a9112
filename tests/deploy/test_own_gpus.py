# SPDX-License-Identifier: Apache-2.0
"""This machine's GPU by NVML's name, and the hints that it decides."""

import pytest

from dflash_trt.deploy import catalog
from dflash_trt.deploy.gpus import gpu_named, known_gpus, parse_gpus


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
