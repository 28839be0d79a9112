# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.build_dry_run import print_deployment_dry_run, print_plan_dry_run
from dflash_trt.cli.build_engine import build_checkpoint, build_deployment
from dflash_trt.cli.build_request import BACKENDS, BuildRequest, asked_plans, check_usage
from dflash_trt.cli.completion import DRAFT_OR_DEPLOYMENT, RECIPE, TARGET
from dflash_trt.cli.options import PATH, FiniteRange, options, parsed
from dflash_trt.deploy.deployment_file import deployment_path
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.plans.machine import parse_gpus
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.errors import DFlashError
from dflash_trt.files.command import quoted

if TYPE_CHECKING:
    from dflash_trt.engine.proposal_head import HeadChoice

DEFAULTS = PlanOptions()
SIZE = click.IntRange(1, 2**31 - 1)  # slots, lengths and positions are INT32 in both graphs


def _head(text: str) -> HeadChoice | None:
    """Parses --head; loads the builder only where the draft gets a head of its own."""
    if text == "target":
        return None
    from dflash_trt.engine.proposal_head import parse_head

    return parse_head(text)


def _workspace(context: click.Context, parameter: click.Parameter, gib: float | None) -> int | None:
    """--workspace-gib in bytes."""
    return None if gib is None else int(gib * 2**30)


@click.command(short_help="Write an engine directory from a draft checkpoint.")
@click.argument("draft", type=DRAFT_OR_DEPLOYMENT, required=False)
@options(
    click.option("--target", type=TARGET, help="Target checkpoint: directory or Hugging Face repository id."),
    click.option("-o", "--output", type=PATH, help="Engine directory to write."),
    click.option("--plans-for", metavar="ENGINE", type=PATH,
                 help="In place of DRAFT: build the TensorRT plans that this engine directory lacks."),
    click.option("--recipe", type=RECIPE, help="Quantise first: a recipe as for `dflash-trt quantize`."),
    click.option("--calibration", metavar="FILE|none", default="none", show_default=True, help="For --recipe."),
    click.option("--head", metavar="HEAD", default="target", show_default=True, callback=parsed(_head),
                 help="What proposes tokens: target, or a copy of its lm_head: fp8, nvfp4, trim:N, trim:N:fp8,"
                 " trim:N:nvfp4."),
    click.option("--head-tokens", metavar="FILE", type=PATH,
                 help="For trim:N: features that `dflash-trt capture` wrote; their answers' most frequent tokens are"
                 " kept."),
    click.option("--tp", type=click.IntRange(min=1), metavar="N",
                 help="For TensorRT-LLM: number of ranks that share the drafter's heads and MLPs. Default: 1, every"
                 " rank runs the whole drafter."),
    click.option("--force", is_flag=True, help="Replace an existing output directory."),
    click.option("--dry-run", is_flag=True,
                 help="Only print what would be built, the memory and trtexec's command lines."),
    click.option("--json", "as_json", is_flag=True, help="Print --dry-run as one JSON document."),
    click.option("--backend", type=click.Choice(["onnx", *BACKENDS]), default="onnx", show_default=True,
                 help="tensorrt: plans for this machine's GPU as well; tensorrt-rtx: by TensorRT-RTX, for --gpu or this"
                 " machine's."),
    click.option("--gpu", "compute_capabilities", metavar="GPU,...", callback=parsed(parse_gpus),
                 help="Plans by TensorRT-RTX, which builds on any machine: sm80, sm86, sm89, sm120, sm121, or names"
                 " such as a100, rtx4090, rtx5090, gb10."),
    click.option("--max-batch-size", type=SIZE,
                 help="Blocks of one pass and slots of the context cache;"
                 f" {DEFAULTS.max_batch_size} unless CONFIG.yaml says otherwise."),
    click.option("--max-seq-len", type=SIZE,
                 help=f"Context rows per slot; {DEFAULTS.max_seq_len} unless CONFIG.yaml says otherwise."),
    click.option("--max-num-tokens", type=SIZE,
                 help=f"Context rows per injection; {DEFAULTS.max_num_tokens} unless CONFIG.yaml says otherwise."),
    click.option("--workspace-gib", "workspace_bytes", type=FiniteRange(0, 2**20, min_open=True), callback=_workspace,
                 help=f"Scratch memory of TensorRT's builder; {DEFAULTS.workspace_bytes / 2**30:g} unless given."),
    click.option("--hardware-compatibility", type=click.Choice(["none", "same_compute_capability", "ampere_plus"]),
                 help="none: plans for this GPU model alone, the fastest."),
    click.option("--version-compatible/--no-version-compatible", default=None,
                 help="Plans for later TensorRT versions of this major, too; the plugin is embedded."),
    click.option("--timing-cache", type=PATH, help="File that keeps what TensorRT measured."),
    click.option("--reproducible", is_flag=True, help="Measure nothing: every kernel comes from --timing-cache."),
)  # fmt: skip
def build(**settings: Any) -> None:
    """Write an engine directory from DRAFT, a checkpoint directory or Hugging Face repository id.

    DRAFT may be quantised, by `dflash-trt quantize` or by modelopt; weights of compressed-tensors and GGUF files are
    dequantised to BF16, and a --recipe applies to that. It may also be a deployment, CONFIG.yaml or the
    name of one that `serve-config --list` shows: it names draft, target and recipe, and -o unless given.
    TensorRT builds plans on the GPU machine: at once with --backend tensorrt, or later with --plans-for. For RTX GPUs,
    A100, L40S and GB10, TensorRT-RTX builds them on any machine: --gpu.

    \b
    Example:
      dflash-trt build z-lab/gpt-oss-120b-DFlash --target openai/gpt-oss-120b -o engine --recipe nvfp4
      dflash-trt build --plans-for engine
      dflash-trt build z-lab/Qwen3-8B-DFlash-b16 --target Qwen/Qwen3-8B -o engine --recipe fp8 --gpu rtx5090
    """
    request = BuildRequest(**settings)
    check_usage(request)
    deployment = None if request.draft is None else deployment_path(request.draft)
    if request.dry_run:
        if request.plans_for is not None:
            print_plan_dry_run(request.plans_for, request)
        elif deployment is not None:
            print_deployment_dry_run(deployment, request)
        else:
            raise click.UsageError("--dry-run is for CONFIG.yaml or --plans-for ENGINE")
        return
    if request.plans_for is not None:
        engine = request.plans_for
    elif deployment is not None:
        engine = build_deployment(deployment, request)
    else:
        engine = build_checkpoint(request)
    if request.has_plans:
        _add_plans(engine, request)
    click.echo(
        f"next: dflash-trt verify {quoted(engine)} --prompts FILE; then: dflash-trt serve {quoted(engine)}", err=True
    )
    click.echo(engine)


def _add_plans(engine: Path, request: BuildRequest) -> None:
    """Adds plans; an error also says that the engine is complete without them."""
    from dflash_trt.engine.plans.add_plans import add_plans

    manifest = read_manifest(engine)
    plan_options = asked_plans(manifest.plan_options, manifest.quantization.algorithms(), request)
    try:
        add_plans(engine, plan_options, request.cache)
    except DFlashError as error:
        next_command = f"dflash-trt build --plans-for {quoted(engine)}"
        hint = f"{error.hint}; then: {next_command}" if error.hint else next_command
        raise type(error)(
            f"{error.message}\n{engine} is complete for ONNX Runtime, without new plans", hint=hint
        ) from None
