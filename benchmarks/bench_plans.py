# SPDX-License-Identifier: Apache-2.0
"""Counts kernels, bytes and CPU time of TensorRT-RTX's plans for drafts of Qwen3-8B's shape, with random weights.

A draft of each kind: five layers, blocks of 16; a correlator with the sizes of NVIDIA's recipe (Model-Optimizer,
dflash_architecture_config of LiLiCorr). Each is built in a process of its own, for SM 12.0 and the default sizes;
memory is that of the largest process, which is the builder. Kernels are those of one pass with one block. Prints a
table, asserts nothing; takes ten minutes and 5 GB of disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.forced_acceptance import SIZES  # noqa: E402
from dflash_trt.checkpoint.draft_checkpoint import read_draft  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.engine.engine_directory import BuildOptions, build_engine  # noqa: E402
from dflash_trt.engine.manifest import read_manifest  # noqa: E402
from dflash_trt.engine.plans.add_plans import add_plans  # noqa: E402
from dflash_trt.engine.plans.plan import PlanOptions  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.quantize.recipe import load_recipe  # noqa: E402
from tests.engine.plans.plan_layers import num_kernels, summary  # noqa: E402
from tests.engine.plans.rtx import compiled  # noqa: E402
from tests.engines import fitting_target  # noqa: E402
from tests.reference import synthetic  # noqa: E402

NVIDIAS = {
    "lilicorr_candidate_topk": 8, "lilicorr_factor_dim": 1024, "lilicorr_hidden_size": 1024, "lilicorr_logit_scale": 8,
    "lilicorr_mlp_ratio": 2.0, "lilicorr_num_heads": 8, "lilicorr_num_layers": 2, "lilicorr_vector_eps": 1e-4,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DFlash2": {"dflash2": True},
    "LiLiCorr": {"lilicorr": "plain", "correlator": NVIDIAS},
    "LiLiCorr, convolutions": {"lilicorr": "convolved", "correlator": NVIDIAS},
}
COLUMNS = ("draft", "kernels", "plans, MB", "CPU, s", "peak, GiB")


@click.group(invoke_without_command=True)
@click.option("--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True, default=list(KINDS))
@click.option("--recipe", default="bf16", show_default=True)
@click.pass_context
def main(ctx: click.Context, kinds: tuple[str, ...], recipe: str) -> None:
    """Write each draft, build it, print the table."""
    if ctx.invoked_subcommand is not None:
        return
    rows = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as work:
            rows.append((kind, *measured(Path(work), kind, recipe)))
    print_table(f"{recipe}, {cpu_model()}", COLUMNS, rows)


def measured(work: Path, kind: str, recipe: str) -> tuple[str, ...]:
    """Kernels by graph, megabytes by plan, CPU seconds of the build, and GiB of its largest process."""
    draft, engine = work / "draft", work / "engine"
    # Not here: a new process begins with the peak of the one that starts it.
    subprocess.run([sys.executable, __file__, "write", str(draft), kind], check=True)
    process = subprocess.Popen([sys.executable, __file__, "build", str(draft), str(engine), recipe])
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(1)
    shutil.rmtree(draft)
    manifest = read_manifest(engine)
    kernels = {graph: num_kernels(summary(compiled(engine, graph)[1])) for graph in manifest.graphs}
    megabytes = {plan.file: (engine / plan.file).stat().st_size / 1e6 for plan in manifest.plans.values()}
    return (
        ", ".join(f"{graph} {count}" for graph, count in kernels.items()),
        ", ".join(f"{size:,.0f}" for size in megabytes.values()),
        f"{used.ru_utime + used.ru_stime:.0f}",
        f"{used.ru_maxrss / 2**20:.1f}",
    )


@main.command("write")
@click.argument("draft", type=click.Path(path_type=Path))
@click.argument("kind")
def write_one(draft: Path, kind: str) -> None:
    """Write DRAFT of Qwen3-8B's shape, with random weights."""
    synthetic.CONV_GROUP, synthetic.SELECTOR_RANK, synthetic.TOP_K = 16, 256, 16  # the published ones
    layers, sizes = ["full_attention"] * 5, SIZES["qwen3-8b"]
    synthetic.write_random_draft(draft, dialect="qwen3", layer_types=layers, sizes=sizes, **KINDS[kind])


@main.command("build")
@click.argument("draft", type=click.Path(path_type=Path))
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("recipe")
def build_one(draft: Path, engine: Path, recipe: str) -> None:
    """Build ENGINE and its plans."""
    checkpoint = read_draft(draft)
    build_engine(
        BuildOptions(
            draft=checkpoint, draft_name=str(draft), target=fitting_target(checkpoint), output=engine,
            recipe=load_recipe(recipe),
        )
    )  # fmt: skip
    add_plans(engine, PlanOptions(runtime="tensorrt_rtx", compute_capabilities=("12.0",)))


if __name__ == "__main__":
    main()
