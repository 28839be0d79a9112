# SPDX-License-Identifier: Apache-2.0
"""Steps of gpu_report.py that are no command of dflash-trt: each a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash_trt.cli.output import print_table
from dflash_trt.drafter.drafter import Drafter
from dflash_trt.drafter.executor import Executor
from dflash_trt.drafter.launcher import CudaLauncher
from dflash_trt.drafter.onnx_executor import OnnxExecutor
from dflash_trt.drafter.tensorrt_executor import TensorRTExecutor
from dflash_trt.engine.manifest import Manifest, read_manifest
from tests.engines import build
from tests.reference.synthetic import DraftSizes, write_random_draft

# Activations are BF16 under TensorRT and FP32 here: 8 bits of mantissa, over a few layers.
TOLERANCE = 0.05
STEPS = ((3, 5), (1, 2), (60, 30))  # context rows of both slots before a block; the last are more than a plan takes


@click.group()
def steps() -> None:
    """Steps of gpu_report.py."""


@steps.command()
@click.argument("engine", type=click.Path(path_type=Path))
def parity(engine: Path) -> None:
    """The same taps and blocks through TensorRT and through ONNX Runtime; exits with 1 where they differ by more."""
    manifest = read_manifest(engine)
    tensorrt = TensorRTExecutor(engine, manifest, CudaLauncher(torch.device("cuda")))
    errors = list(differences(manifest, tensorrt, OnnxExecutor(engine, manifest)))
    rows = [(str(step), f"{100 * error:.2f} %") for step, error in enumerate(errors, start=1)]
    print_table("hidden states, TensorRT less ONNX Runtime, of their root mean square", ("step", "difference"), rows)
    if not max(errors) < TOLERANCE:
        raise SystemExit(f"expected less than {100 * TOLERANCE:.0f} %, which BF16 explains")


def differences(manifest: Manifest, one: Executor, other: Executor) -> Iterator[float]:
    """Of the hidden states of both drafters after each step: root mean square, relative to `other`."""
    spec, rng = manifest.draft, torch.Generator().manual_seed(0)
    drafters = [Drafter.open(executor, spec, num_slots=2) for executor in (one, other)]
    for num_rows in STEPS:
        taps = torch.randn(sum(num_rows), spec.target_hidden_size, generator=rng)
        block = torch.randn(2, spec.block_size, spec.hidden_size, generator=rng)
        found, expected = (_step(drafter, num_rows, taps, block) for drafter in drafters)
        yield float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def _step(drafter: Drafter, num_rows: tuple[int, int], taps: Tensor, block: Tensor) -> Tensor:
    device = drafter.executor.device
    drafter.inject((0, 1), num_rows, taps.to(device))
    return drafter.draft((0, 1), block.to(device)).float().cpu()


@steps.command()
@click.argument("engine", type=click.Path(path_type=Path))
def large(engine: Path) -> None:
    """An engine directory of the shape of gpt-oss-120b's drafter, with random weights (1.5 GB)."""
    draft = engine.with_name(f"{engine.name}-draft")
    write_large_draft(draft)
    manifest = build(draft, engine)
    size = sum(file.stat().st_size for file in engine.iterdir())
    click.echo(f"{engine}: {manifest.draft.num_layers} layers, {size / 2**30:.2f} GiB")


def write_large_draft(draft: Path) -> None:
    """A draft checkpoint of that shape: 785 million parameters in BF16."""
    sizes = DraftSizes(
        hidden=2880, intermediate=7680, num_heads=64, num_kv_heads=8, head_dim=64, num_taps=5, num_target_layers=36,
        block_size=10, vocab_size=201088,
    )  # fmt: skip
    write_random_draft(draft, dialect="gpt_oss", layer_types=["full_attention"] * 8, sizes=sizes)


if __name__ == "__main__":
    steps()
