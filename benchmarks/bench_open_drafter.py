# SPDX-License-Identifier: Apache-2.0
"""Measures opening a drafter of gpt-oss-120b's shape on this CPU, with random weights, in BF16 and quantised.

Each is opened once before, so that its file is cached, then --rounds times, every time in a process of its own. Times
are of reading the manifest, which checks the files, and of opening: CPU seconds and wall-clock, the median round; then
of the first block and of a later one, whose context is 16 tokens. Memory is the process's own beyond what it had,
sampled every 10 ms until the first block is there; "mapped" is what it has of files then, whose pages others share.
Prints a table, asserts nothing; takes three minutes and 6 GB of disk the first time, then half of one. OMP_NUM_THREADS
sets the threads.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.forced_acceptance import SIZES  # noqa: E402
from dflash_trt.checkpoint.draft_checkpoint import read_draft  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.engine.manifest import read_manifest  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.quantize.convert import quantize_checkpoint  # noqa: E402
from dflash_trt.quantize.recipe import load_recipe  # noqa: E402
from dflash_trt.runtime.drafter.open import open_drafter  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.reference.synthetic import write_random_draft  # noqa: E402

RECIPES = ("bf16", "fp8", "nvfp4")
COLUMNS = ("weights", "file, GiB", "own, GiB", "mapped", "of FLOAT", "CPU, s", "of it checking", "wall-clock, s",
           "first block, ms", "a block")  # fmt: skip


class Opening(NamedTuple):
    """Seconds of CPU and wall-clock, and bytes."""

    check: float
    cpu: float
    wall: float
    first: float
    later: float
    own: int
    mapped: int


@click.group(invoke_without_command=True)
@click.option("--work", type=click.Path(path_type=Path), default=REPOSITORY / "build" / "open", help="Keeps engines.")
@click.option("--rounds", default=3, show_default=True)
@click.pass_context
def main(ctx: click.Context, work: Path, rounds: int) -> None:
    """Write the engines that are not there, open each, print the table."""
    if ctx.invoked_subcommand is not None:
        return
    prepare(work)
    num_bytes = 2 * weight_bytes(work / "bf16")
    rows = []
    for recipe in RECIPES:
        openings = [measured(work / recipe) for _ in range(rounds + 1)][1:]
        median = Opening(*(statistics.median(values) for values in zip(*openings, strict=True)))
        sizes = (f"{size / 2**30:.2f}" for size in (weight_bytes(work / recipe), median.own, median.mapped))
        share = f"{(median.own + median.mapped) / num_bytes:.2f}"
        seconds = (f"{value:.1f}" for value in (median.cpu, median.check, median.wall))
        blocks = (f"{1e3 * value:.0f}" for value in (median.first, median.later))
        rows.append((recipe, *sizes, share, *seconds, *blocks))
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    print_table(f"{num_bytes / 2**30:.2f} GiB in FLOAT; {cpu_model()}, threads: {threads}", COLUMNS, rows)


def prepare(work: Path) -> None:
    """An engine for each recipe, where `work` has none."""
    work.mkdir(parents=True, exist_ok=True)
    draft, packed = work / "draft", work / "packed"
    for recipe in [recipe for recipe in RECIPES if not (work / recipe).is_dir()]:
        if not draft.is_dir():
            write_random_draft(
                draft, dialect="gpt_oss", layer_types=["full_attention"] * 8, sizes=SIZES["gpt-oss-120b"]
            )
        quantize_checkpoint(read_draft(draft), load_recipe(recipe), packed)
        build(packed, work / recipe)
        shutil.rmtree(packed)
    shutil.rmtree(draft, ignore_errors=True)


def weight_bytes(engine: Path) -> int:
    """Bytes of the weights file."""
    return (engine / "model.safetensors").stat().st_size


def measured(engine: Path) -> Opening:
    """One opening, in a process of its own."""
    command = [sys.executable, __file__, "open", str(engine)]
    return Opening(*json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


@main.command("open")
@click.argument("engine", type=click.Path(path_type=Path))
def open_one(engine: Path) -> None:
    """Open ENGINE and print the numbers as JSON."""
    import onnxruntime  # noqa: F401
    import torch

    done = threading.Event()
    before, files, samples = memory(), mapped(), [0]

    def sample() -> None:
        while not done.wait(0.01):
            samples.append(memory())

    sampler = threading.Thread(target=sample)
    sampler.start()
    start, begin = time.process_time(), time.perf_counter()
    manifest = read_manifest(engine)
    checked = time.process_time()
    drafter = open_drafter(engine, manifest)
    cpu, wall = time.process_time() - start, time.perf_counter() - begin
    spec = manifest.draft
    embeds = torch.randn(1, spec.block_size, spec.hidden_size)
    with torch.inference_mode():
        drafter.inject([0], [16], torch.randn(16, spec.target_hidden_size))
        first, *later = [seconds(lambda: drafter.run([0], embeds)) for _ in range(8)]
    samples.append(memory())
    done.set()
    sampler.join()
    own, in_files = max(samples) - before, mapped() - files
    click.echo(json.dumps(Opening(checked - start, cpu, wall, first, statistics.median(later), own, in_files)))


def seconds(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def mapped() -> int:
    """Bytes of this process that files back, shared memory aside."""
    return int(Path("/proc/self/status").read_text(encoding="utf-8").split("RssFile:")[1].split()[0]) * 1024


def memory() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
