# SPDX-License-Identifier: Apache-2.0
"""Finds the size from which a draft's pass is worth more than one thread of ONNX Runtime on this machine.

Drafts of two layers with random weights, from a largest matrix of a quarter MiB to 64 MiB in FLOAT: each drafts blocks
of 8 after 64 rows of context, with one thread and with torch's number of threads. Before each pass torch computes on
its own threads and reads 16 MiB, as a target does between two drafts, so ONNX Runtime's sleep and caches are cold. Both
ways take turns; wall-clock is the median pass, CPU time the mean of the process while it lasts. "rule" is what
`graph_session.num_threads` chooses. Prints tables, asserts nothing; two minutes, best when nothing else runs.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import click
import onnx
import torch

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.engine.manifest import read_manifest  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.runtime.drafter.drafter import Drafter  # noqa: E402
from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor  # noqa: E402
from dflash_trt.runtime.drafter.onnxruntime import graph_session  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.reference.synthetic import DraftSizes, write_random_draft  # noqa: E402

WIDTHS = (128, 192, 256, 384, 512, 768, 1024, 1664)
BLOCK, CONTEXT = 8, 64


@click.command()
@click.option("--seconds", default=5.0, show_default=True, help="For each draft and batch size.")
@click.option("--batch-size", "batches", type=int, multiple=True, default=(1, 8), show_default=True, help="Blocks.")
def main(seconds: float, batches: tuple[int, ...]) -> None:
    """Print wall-clock and CPU time of drafts of several sizes, by one thread and by torch's number."""
    counts = (1, torch.get_num_threads())
    rows: dict[int, list[tuple[str, ...]]] = {batch: [] for batch in batches}
    for hidden in WIDTHS:
        with tempfile.TemporaryDirectory() as place:
            engine = write_engine(Path(place), hidden)
            model = onnx.load(engine / "draft.onnx", load_external_data=False)
            drafters = [open_with(engine, count, max(batches)) for count in counts]
        size = max(num_bytes(weight) for weight in model.graph.initializer) / 2**20
        for batch in batches:
            (one, cpu_one), (many, cpu_many) = measured(drafters, batch, seconds)
            numbers = (f"{one:.3f}", f"{many:.3f}", f"{many / one:.2f}", f"{cpu_one:.3f}", f"{cpu_many:.3f}")
            rows[batch].append((f"{hidden}", f"{size:.2f}", *numbers, str(graph_session.num_threads(model))))
    columns = ("width", "MiB", "ms, 1", f"ms, {counts[1]}", "ratio", "CPU ms, 1", f"CPU ms, {counts[1]}", "rule")
    for batch in batches:
        title = f"a pass, blocks of {BLOCK} tokens in it: {batch}; by threads; {cpu_model()}, {os.cpu_count()} cores"
        print_table(title, columns, rows[batch])


def num_bytes(weight: onnx.TensorProto) -> int:
    """In FLOAT."""
    return 4 * int(torch.tensor(list(weight.dims)).prod())


def write_engine(place: Path, hidden: int) -> Path:
    """A draft whose gate and up projections are [3 * hidden, hidden] each."""
    sizes = DraftSizes(
        hidden=hidden, intermediate=3 * hidden, num_heads=hidden // 32, num_kv_heads=hidden // 64, head_dim=32,
        block_size=BLOCK,
    )  # fmt: skip
    write_random_draft(place / "draft", dialect="qwen3", layer_types=["full_attention"] * 2, sizes=sizes)
    build(place / "draft", place / "engine")
    return place / "engine"


def open_with(engine: Path, count: int, num_slots: int) -> Drafter:
    """A drafter whose sessions have `count` threads, with context in each slot."""
    manifest = read_manifest(engine)
    with patch.object(graph_session, "num_threads", lambda _: count):
        drafter = Drafter.open(OnnxExecutor(engine, manifest), manifest.draft, num_slots=num_slots)
    taps = torch.randn(CONTEXT * num_slots, manifest.draft.target_hidden_size)
    drafter.inject(range(num_slots), [CONTEXT] * num_slots, taps)
    return drafter


@torch.inference_mode()
def measured(drafters: list[Drafter], batch: int, seconds: float) -> list[tuple[float, float]]:
    """Wall-clock and CPU time of a pass of each drafter in turn, in ms."""
    embeds = torch.randn(batch, BLOCK, drafters[0].spec.hidden_size)
    x, weight = torch.randn(16, 2048), torch.randn(2048, 2048)
    wall: list[list[float]] = [[] for _ in drafters]
    cpu: list[list[float]] = [[] for _ in drafters]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, drafter in enumerate(drafters):
            x = torch.nn.functional.linear(x, weight).tanh()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            drafter.run(range(batch), embeds)
            cpu[i].append(time.process_time() - cpu_begin)
            wall[i].append(time.perf_counter() - begin)
    return [(1e3 * statistics.median(w), 1e3 * statistics.mean(c)) for w, c in zip(wall, cpu, strict=True)]


if __name__ == "__main__":
    main()
